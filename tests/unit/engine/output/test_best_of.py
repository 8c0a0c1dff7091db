"""best_of: the n best of all computed sequences, emitted at the end, and on a real model."""

from __future__ import annotations

import pytest
from msgspec import structs

from quire import LLM, SamplingParams
from quire.base.records import FinishReason
from quire.engine.output.best_of import Ranking
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText


def delta(
    index: int, logprobs: list[float], *, reason: FinishReason | None = FinishReason.LENGTH
) -> TextDelta:
    return TextDelta(
        index=index,
        text=f"<{index}>" * len(logprobs),
        token_ids=tuple(range(len(logprobs))),
        logprobs=tuple(TokenText(token_id=0, text="", raw=b"", logprob=lp) for lp in logprobs),
        finish_reason=reason,
        stop_reason=None,
        num_prompt_tokens=3,
        cached_tokens=0,
        num_output_tokens=len(logprobs),
        times=None,
        seed=1,
        error="it failed" if reason is FinishReason.ERROR else None,
    )


def test_the_highest_mean_is_the_best_and_nothing_is_emitted_before_all_have_ended() -> None:
    ranking = Ranking(SamplingParams(n=2, best_of=4), first_stream=8)
    assert ranking.take(delta(8, [-1.0, -3.0])) == []
    assert ranking.take(delta(9, [-0.5], reason=None)) == []
    assert ranking.take(delta(10, [-9.0])) == []
    assert ranking.take(delta(9, [-0.5, -0.5])) == []
    best = ranking.take(delta(11, [-1.0] * 9))
    assert [(one.index, one.text) for one in best] == [(8, "<9><9><9>"), (9, "<11>" * 9)]
    assert [one.num_unseen_tokens for one in best] == [3, 0]
    assert all(one.logprobs == () for one in best)


def test_drafts_of_sequences_that_are_dropped_count_with_those_of_the_best() -> None:
    """As their tokens do."""
    ranking = Ranking(SamplingParams(n=2, best_of=4), first_stream=0)
    best: list[TextDelta] = []
    for index, (accepted, rejected) in enumerate([(1, 0), (2, 5), (0, 0), (40, 70)]):
        ended = delta(index, [-1.0 * index] * 50)
        best = ranking.take(
            structs.replace(ended, accepted_drafts=accepted, rejected_drafts=rejected)
        )
    assert [(one.accepted_drafts, one.rejected_drafts) for one in best] == [(41, 70), (2, 5)]


def test_a_failed_sequence_comes_last_and_ties_keep_their_order() -> None:
    ranking = Ranking(SamplingParams(n=2, best_of=3, logprobs=0), first_stream=0)
    ranking.take(delta(0, [-0.1], reason=FinishReason.ERROR))
    ranking.take(delta(2, [-2.0]))
    best = ranking.take(delta(1, [-2.0]))
    assert [one.text for one in best] == ["<1>", "<2>"]
    assert [len(one.logprobs) for one in best] == [1, 1]


@pytest.fixture(scope="module")
def llm():
    with LLM(max_num_seqs=8, max_model_len=128) as made:
        yield made


PROMPT = "Once upon a time there was a little"


def test_best_of_returns_the_best_of_the_answers_of_n(llm: LLM) -> None:
    every = llm.generate([PROMPT], SamplingParams(n=6, seed=5, max_tokens=9, logprobs=0))[0]
    best = llm.generate([PROMPT], SamplingParams(n=2, best_of=6, seed=5, max_tokens=9))[0]
    means = {
        one.text: sum(token.logprob for token in one.logprobs) / len(one.logprobs)
        for one in every.outputs
    }
    ranked = sorted(means, key=lambda text: -means[text])
    assert [one.text for one in best.outputs] == ranked[:2]
    assert [one.index for one in best.outputs] == [0, 1]
    assert all(not one.logprobs for one in best.outputs)


def test_128_answers_are_computed_though_few_run_at_once(llm: LLM) -> None:
    answer = llm.generate([PROMPT], SamplingParams(n=128, seed=5, max_tokens=2))[0]
    assert [one.index for one in answer.outputs] == list(range(128))
    assert len({one.token_ids for one in answer.outputs}) > 10


def test_beams_are_returned_best_first_with_their_scores(llm: LLM) -> None:
    sampling = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=12, logprobs=0)
    beams = llm.generate([PROMPT], sampling)[0].outputs
    scores = [one.score for one in beams]
    assert scores == sorted(scores, reverse=True)
    for one in beams:
        assert sum(t.logprob for t in one.logprobs) / 12 == pytest.approx(one.score)


def test_one_beam_is_greedy(llm: LLM) -> None:
    one = SamplingParams(use_beam_search=True, temperature=0.0, max_tokens=12)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    assert llm.generate([PROMPT], one)[0].text == llm.generate([PROMPT], greedy)[0].text


def test_two_searches_and_other_requests_match_their_run_alone(llm: LLM) -> None:
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0.0, max_tokens=12)
    drawn = SamplingParams(seed=3, max_tokens=12)
    prompts = [PROMPT, "The dog ran to the", PROMPT, "One day,"]
    wishes = [beams, beams, drawn, drawn]
    together = llm.generate(prompts, wishes)
    for prompt, sampling, answer in zip(prompts, wishes, together, strict=True):
        alone = llm.generate([prompt], sampling)[0]
        assert [one.token_ids for one in answer.outputs] == [one.token_ids for one in alone.outputs]
        assert [one.score for one in answer.outputs] == [one.score for one in alone.outputs]
