"""The search alone: it finds what trying every continuation finds, from few log-probabilities."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from quire.base.records import FinishReason, Request, TokenRules
from quire.base.sampling_params import SamplingParams
from quire.scheduler.beams import BeamSearch
from tests.unit.scheduler.beam_oracle import Wishes, beams
from tests.unit.scheduler.fake_worker import beam_logprobs, mix

PROMPT = (3, 1, 4)


def request(
    wishes: Wishes, *, banned: tuple[tuple[int, ...], ...] = (), logprobs: int | None = None
) -> Request:
    sampling = SamplingParams(
        n=wishes.width,
        use_beam_search=True,
        temperature=0.0,
        length_penalty=wishes.length_penalty,
        early_stopping=wishes.early_stopping,
        min_tokens=wishes.min_new,
        logprobs=logprobs,
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
        rules=TokenRules(banned_sequences=banned),
    )


def logprobs_after(salt: int, tokens: tuple[int, ...]) -> list[float]:
    digest = 7 + salt
    for token_id in tokens:
        digest = mix(digest, token_id)
    return beam_logprobs(digest)


def run(search: BeamSearch, salt: int, *, told: int) -> BeamSearch:
    """The search to its end, told the best `told` of each beam."""
    while not search.is_done:
        ids, values = [], []
        for tokens in search.tokens[:, len(PROMPT) :].tolist():
            logprobs = np.array(logprobs_after(salt, tuple(tokens)), np.float32)
            best = np.argsort(-logprobs, kind="stable")[:told].astype(np.int32)
            ids.append(best)
            values.append(logprobs[best])
        before = search.num_beams
        parents = search.advance(ids, values)
        assert all(0 <= parent < before for parent in parents)
        assert len({tuple(row) for row in search.tokens.tolist()}) == search.num_beams
    return search


def drawn(random: Random) -> Wishes:
    return Wishes(
        width=random.choice([1, 2, 3, 4, 5]),
        max_new=random.choice([1, 2, 5, 12]),
        length_penalty=random.choice([0.0, 0.6, 1.0, 2.0, -1.0]),
        early_stopping=random.choice([True, False, "never"]),
        stop_ids=random.choice([(), (2,), (2, 5), (0, 1, 2, 3)]),
        min_new=random.choice([0, 0, 1]),
    )


def test_it_finds_what_trying_every_continuation_finds() -> None:
    stopped = ended_early = 0
    for salt in range(300):
        random = Random(salt)
        wishes = drawn(random)
        search = BeamSearch(request(wishes), len(PROMPT) + wishes.max_new)
        run(search, salt, told=search.num_candidates)
        expected = beams(lambda tokens, salt=salt: logprobs_after(salt, tokens), wishes)
        assert [one.token_ids for one in search.finished] == [ids for _, ids in expected], wishes
        assert [one.score for one in search.finished] == pytest.approx(
            [score for score, _ in expected]
        )
        stopped += any(one.finish_reason is FinishReason.STOP for one in search.finished)
        ended_early += all(len(one.token_ids) < wishes.max_new for one in search.finished)
    assert stopped > 100
    assert ended_early > 50


def test_a_sequence_that_ends_has_its_stop_token_and_says_so() -> None:
    wishes = Wishes(width=3, max_new=6, stop_ids=(2, 5))
    search = run(BeamSearch(request(wishes), len(PROMPT) + 6), 4, told=9)
    for one in search.finished:
        is_stop = one.token_ids[-1] in wishes.stop_ids
        assert (one.finish_reason is FinishReason.STOP) == is_stop
        assert not any(token_id in wishes.stop_ids for token_id in one.token_ids[:-1])


def test_each_token_can_have_its_log_probability_and_their_sum_is_the_score() -> None:
    wishes = Wishes(width=3, max_new=5, length_penalty=0.0)
    search = BeamSearch(request(wishes, logprobs=2), len(PROMPT) + 5)
    for one in run(search, 1, told=search.num_candidates).finished:
        assert tuple(told.token_id for told in one.logprobs) == one.token_ids
        assert sum(told.logprob for told in one.logprobs) == pytest.approx(one.score)
        assert all(len(told.top) == 2 for told in one.logprobs)


def test_banned_sequences_are_in_no_beam_and_others_come_in_their_place() -> None:
    wishes = Wishes(width=4, max_new=6)
    free = run(BeamSearch(request(wishes), len(PROMPT) + 6), 9, told=11).finished
    first, second = free[0].token_ids[:2]
    banned = ((second,), (first, free[0].token_ids[1]), (4, free[1].token_ids[0]))
    search = BeamSearch(request(wishes, banned=banned), len(PROMPT) + 6)
    run(search, 9, told=search.num_candidates)
    assert len(search.finished) == 4
    for one in search.finished:
        told = (*PROMPT, *one.token_ids)
        assert second not in one.token_ids
        assert (4, free[1].token_ids[0]) not in pairwise(told)


def test_fewer_log_probabilities_than_asked_for_end_in_fewer_beams_not_in_wrong_ones() -> None:
    wishes = Wishes(width=4, max_new=3)
    search = run(BeamSearch(request(wishes), len(PROMPT) + 3), 0, told=1)
    assert len(search.finished) == 1


def test_what_all_beams_begin_with_is_counted_in_tokens() -> None:
    search = BeamSearch(request(Wishes(width=3, max_new=9)), len(PROMPT) + 9)
    assert search.num_shared_tokens == len(PROMPT)
    one = np.array([7, 8, 9], np.int32)
    search.advance([one], [np.array([-0.1, -5.0, -6.0], np.float32)])
    assert search.num_shared_tokens == len(PROMPT)
    far = np.array([-50.0, -60.0, -70.0], np.float32)
    search.advance([one, one, one], [np.array([-0.1, -0.2, -0.3], np.float32), far, far])
    assert search.num_shared_tokens == len(PROMPT) + 1
