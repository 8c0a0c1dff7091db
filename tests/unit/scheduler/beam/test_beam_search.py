"""The search alone: it equals an exhaustive search, from few log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.records import Candidates, FinishReason, Request, StepResult
from quire.base.sampling_params import SamplingParams
from quire.scheduler.beam.beam_search import BeamCandidates, BeamSearch, beam_candidates_of
from tests.unit.scheduler.beam.beam_oracle import Wishes, beams
from tests.unit.scheduler.fake_worker import beam_logprobs, mix

PROMPT = (3, 1, 4)


def request(wishes: Wishes, *, logprobs: int | None = None, stop: tuple[str, ...] = ()) -> Request:
    sampling = SamplingParams(
        n=wishes.width,
        use_beam_search=True,
        temperature=0.0,
        length_penalty=wishes.length_penalty,
        early_stopping=wishes.early_stopping,
        min_tokens=wishes.min_new,
        logprobs=logprobs,
        stop=stop,
        seed=0,
    )
    return Request(
        request_id="r",
        group_id="r",
        stream=0,
        prompt_ids=np.array(PROMPT, np.int32),
        sampling=sampling,
        stop_ids=tuple(wishes.stop_ids),
        max_total_tokens=len(PROMPT) + wishes.max_new,
        arrival_ms=0.0,
    )


def logprobs_after(salt: int, tokens: tuple[int, ...]) -> list[float]:
    digest = 7 + salt
    for token_id in tokens:
        digest = mix(digest, token_id)
    return beam_logprobs(digest)


def run(search: BeamSearch, wishes: Wishes, salt: int, *, num_best: int) -> BeamSearch:
    """Run the search to its end with the `num_best` best candidates of each beam."""
    while not search.is_done:
        of_beams = []
        for tokens in search.tokens[:, len(PROMPT) :].tolist():
            logprobs = np.array(logprobs_after(salt, tuple(tokens)), np.float32)
            if len(tokens) < wishes.min_new:
                logprobs[list(wishes.stop_ids)] = -np.inf
            best = np.argsort(-logprobs, kind="stable")[:num_best].astype(np.int32)
            best = best[logprobs[best] > -np.inf]
            ends = [wishes.ends((*tokens, id_)) for id_ in best.tolist()]
            of_beams.append(
                BeamCandidates(
                    ids=best,
                    scores=logprobs[best],
                    logprobs=2 * logprobs[best],  # as if penalties had halved all
                    ends=np.array(ends, np.bool_),
                    top=tuple(zip(best[:2].tolist(), logprobs[best[:2]].tolist(), strict=True)),
                )
            )
        before = search.num_beams
        parents = search.advance(of_beams)
        assert all(0 <= parent < before for parent in parents)
        assert len({tuple(row) for row in search.tokens.tolist()}) == search.num_beams
    return search


def reported(ids: NDArray[np.int32], values: list[float]) -> BeamCandidates:
    scores = np.array(values, np.float32)
    return BeamCandidates(ids=ids, scores=scores, logprobs=scores, ends=np.zeros(0, np.bool_))


def ends_often(salt: int, one_in: int) -> Callable[[tuple[int, ...]], bool]:
    """Return a predicate that ends about one answer in so many by its text."""
    return lambda tokens: mix(salt, hash(tokens)) % one_in == 0


def drawn(random: Random) -> Wishes:
    return Wishes(
        width=random.choice([1, 2, 3, 4, 5]),
        max_new=random.choice([1, 2, 5, 12]),
        length_penalty=random.choice([0.0, 0.6, 1.0, 2.0, -1.0]),
        early_stopping=random.choice([True, False, "never"]),
        stop_ids=random.choice([(), (2,), (2, 5), (0, 1, 2, 3)]),
        min_new=random.choice([0, 0, 1]),
    )


@pytest.mark.parametrize("by_text", [False, True])
def test_it_equals_an_exhaustive_search(*, by_text: bool) -> None:
    stopped = ended_early = 0
    for salt in range(300):
        random = Random(salt)
        wishes = drawn(random)
        if by_text:
            wishes = replace(wishes, ends=ends_often(salt, random.choice([2, 4, 12])))
        asked = request(wishes, stop=("the worker says where",) * by_text)
        search = BeamSearch(asked, len(PROMPT) + wishes.max_new)
        run(search, wishes, salt, num_best=search.num_candidates)
        expected = beams(lambda tokens, salt=salt: logprobs_after(salt, tokens), wishes)
        assert [one.token_ids for one in search.finished] == [ids for _, ids in expected], wishes
        assert [one.score for one in search.finished] == pytest.approx(
            [score for score, _ in expected]
        )
        stopped += any(one.finish_reason is FinishReason.STOP for one in search.finished)
        ended_early += all(len(one.token_ids) < wishes.max_new for one in search.finished)
    assert stopped > 100
    assert ended_early > 50


def test_the_search_ends_if_all_candidates_end() -> None:
    wishes = Wishes(width=2, max_new=9, ends=lambda tokens: True)
    search = run(BeamSearch(request(wishes, stop=("x",)), len(PROMPT) + 9), wishes, 3, num_best=4)
    assert [len(one.token_ids) for one in search.finished] == [1, 1]
    assert [one.finish_reason for one in search.finished] == [FinishReason.STOP] * 2
    assert [one.stop_id for one in search.finished] == [None] * 2


def test_one_surviving_beam_branches_to_the_full_width_again() -> None:
    """All but the fourth candidate of the first step end: one beam, and then two again."""
    wishes = Wishes(width=2, max_new=9, early_stopping="never")
    search = BeamSearch(request(wishes, stop=("x",)), len(PROMPT) + 9)
    free = reported(np.arange(6, dtype=np.int32), [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    ends = np.array([True, True, True, False, False, False])
    assert search.advance([replace(free, ends=ends)]) == [0]
    assert search.tokens[:, -1].tolist() == [3]
    assert search.advance([free]) == [0, 0]


def test_a_beam_without_continuations_ends() -> None:
    wishes = Wishes(width=2, max_new=9)
    search = BeamSearch(request(wishes), len(PROMPT) + 9)
    some = reported(np.arange(2, dtype=np.int32), [-1.0, -2.0])
    none = reported(np.full(2, -1, np.int32), [np.nan, np.nan])
    assert search.advance([some]) == [0, 0]
    assert search.advance([none, some]) == [1, 1]
    assert search.advance([none, none]) == []
    assert search.is_done
    assert search.finished == []


def test_a_step_without_candidates_is_a_worker_error() -> None:
    one = np.array([1], np.int32)
    result = StepResult(step=7, token_counts=one, token_ids=one)
    with pytest.raises(WorkerError, match="step 7 has no candidates"):
        beam_candidates_of(result, 0, None)
    table = np.zeros((1, 3), np.float32)
    candidates = Candidates(ids=table.astype(np.int32), scores=table, logprobs=table)
    got = beam_candidates_of(replace(result, candidates=candidates), 0, None)
    assert (got.ids.tolist(), len(got.ends), got.top) == ([0, 0, 0], 0, ())


def test_an_ended_sequence_has_its_stop_token_and_reason() -> None:
    wishes = Wishes(width=3, max_new=6, stop_ids=(2, 5))
    search = run(BeamSearch(request(wishes), len(PROMPT) + 6), wishes, 4, num_best=9)
    for one in search.finished:
        is_stop = one.token_ids[-1] in wishes.stop_ids
        assert (one.finish_reason is FinishReason.STOP) == is_stop
        assert one.stop_id == (one.token_ids[-1] if is_stop else None)
        assert not any(token_id in wishes.stop_ids for token_id in one.token_ids[:-1])


def test_scores_are_sums_of_processed_values_and_logprobs_are_the_models() -> None:
    wishes = Wishes(width=3, max_new=5, length_penalty=0.0)
    search = BeamSearch(request(wishes, logprobs=2), len(PROMPT) + 5)
    for one in run(search, wishes, 1, num_best=search.num_candidates).finished:
        assert tuple(entry.token_id for entry in one.logprobs) == one.token_ids
        assert sum(entry.logprob for entry in one.logprobs) == pytest.approx(2 * one.score)
        assert all(len(entry.top) == 2 for entry in one.logprobs)


def test_missing_log_probabilities_give_fewer_beams_not_wrong_ones() -> None:
    wishes = Wishes(width=4, max_new=3)
    search = run(BeamSearch(request(wishes), len(PROMPT) + 3), wishes, 0, num_best=1)
    assert len(search.finished) == 1


def test_the_common_prefix_of_beams_is_counted_in_tokens() -> None:
    search = BeamSearch(request(Wishes(width=3, max_new=9)), len(PROMPT) + 9)
    assert search.num_shared_tokens == len(PROMPT)
    one = np.array([7, 8, 9], np.int32)
    search.advance([reported(one, [-0.1, -5.0, -6.0])])
    assert search.num_shared_tokens == len(PROMPT)
    far = reported(one, [-50.0, -60.0, -70.0])
    search.advance([reported(one, [-0.1, -0.2, -0.3]), far, far])
    assert search.num_shared_tokens == len(PROMPT) + 1
