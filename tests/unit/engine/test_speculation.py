"""Speculation in the whole engine: the same answers in fewer steps, and where it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import SettingError
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.config.flags import engine_config
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.drafter import Drafter

PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=40, seed=3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, max_tokens=30, seed=4, min_tokens=9, top_k=3),
]


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[LLM]:
    with LLM(model, threads=1, max_num_seqs=4, max_num_batched_tokens=64, speculate="ngram") as llm:
        yield llm


def terms_of(**wishes: object) -> SchedulingParams:
    return SchedulingParams(speculation=SpeculationParams(**wishes))  # type: ignore[arg-type]


def generated(
    llm: LLM, terms: SchedulingParams | list[SchedulingParams] | None
) -> list[tuple[object, ...]]:
    answers = llm.generate(PROMPTS, SAMPLING, terms=terms)
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for (answer,) in (answer.outputs for answer in answers)
    ]


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Verify all drafts, whatever they cost on this machine; return how many are accepted."""
    verified, accepted = Drafter.verified, list[int]()

    def watched(self: Drafter, index: Any, drafted: Any, good: Any) -> None:
        accepted.append(int(good.sum()))
        verified(self, index, drafted, good)

    monkeypatch.setattr(Drafter, "verified", watched)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    return accepted


def test_answers_are_those_without_speculation(drafting: LLM, all_drafts: list[int]) -> None:
    accepted = all_drafts
    plain = generated(drafting, terms_of(is_on=False))
    assert not accepted
    assert generated(drafting, None) == plain
    accepted.clear()
    right = [terms_of(prediction_ids=answer[0]) for answer in plain]
    assert generated(drafting, right) == plain
    assert sum(accepted) > 40


def test_an_answer_ends_within_accepted_drafts_where_it_ends_without_them(
    drafting: LLM, all_drafts: list[int]
) -> None:
    sampling = SamplingParams(temperature=0.8, max_tokens=40, seed=5, ignore_eos=True)
    [plain] = drafting.generate([PROMPTS[0]], sampling, terms=terms_of(is_on=False))
    [whole] = plain.outputs
    ends: list[dict[str, Any]] = [
        {"stop": (whole.text[20:23],)},
        {"stop": (whole.text[20:23],), "min_tokens": 12},
        {"stop_token_ids": (whole.token_ids[17],)},
        {"n": 2, "best_of": 3, "max_tokens": 11},
    ]
    for more in ends:
        asked = replace(sampling, **more)
        found = []
        for terms in (terms_of(is_on=False), terms_of(prediction_ids=whole.token_ids)):
            [answer] = drafting.generate([PROMPTS[0]], asked, terms=terms)
            found.append([(one.text, one.token_ids, one.finish_reason) for one in answer.outputs])
        assert found[0] == found[1], more
        assert 5 < len(found[0][0][1]) < 40, more
        assert max(all_drafts) > 2, more
        all_drafts.clear()


def test_the_card_says_what_is_offered(drafting: LLM) -> None:
    assert (drafting.card.max_draft_tokens, drafting.card.speculates) == (8, True)
    assert "prompt lookup: 12 bytes of host memory per token" in drafting.memory_text


def test_what_cannot_be_had_is_refused_at_the_start() -> None:
    with pytest.raises(SettingError, match="max_draft_tokens is 0"):
        engine_config({"model": "x", "speculate": "ngram", "max_draft_tokens": 0})
    with pytest.raises(SettingError, match="it must be 0 to 64"):
        engine_config({"model": "x", "max_draft_tokens": 65})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "draft"}, "speculate_history_tokens is 64 and speculate is draft"),
        ({"speculate": "self"}, "speculate_history_tokens is 64 and speculate is self"),
        ({"draft_model": "y"}, "something else than prompt lookup drafts"),
        ({"self_draft_layers": 1}, "something else than prompt lookup drafts"),
        ({"max_draft_tokens": 0}, "speculate_history_tokens is 64 and max_draft_tokens is 0"),
        ({"speculate_history_tokens": -1}, "speculate_history_tokens is -1"),
        ({"speculate_history_tokens": 1 << 25}, "at most 16777216 is allowed"),
    ],
)
def test_a_history_that_would_never_be_used_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        engine_config({"model": "x", "speculate_history_tokens": 64, **settings})


def test_earlier_answers_are_proposed_within_a_tenant(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    verified, accepted = Drafter.verified, [0]

    def watched(self: Drafter, index: Any, drafted: Any, good: Any) -> None:
        accepted[-1] += int(good.sum())
        verified(self, index, drafted, good)

    monkeypatch.setattr(Drafter, "verified", watched)
    sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
    off = SchedulingParams(speculation=SpeculationParams(is_on=False))
    settings: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "speculate": "ngram"}
    with LLM(model, speculate_history_tokens=100, **settings) as llm:
        assert "prompt lookup: history of answers" in llm.memory_text
        answers = []
        for terms in (off, *(SchedulingParams(tenant=name) for name in ("a", "a", "b", "a"))):
            [answer] = llm.generate([[5, 6, 7]], sampling, terms=terms)
            answers.append(answer.outputs[0].token_ids)
            accepted.append(0)
    assert answers == [answers[0]] * 5
    assert accepted[0] == 0
    assert min(accepted[2], accepted[4]) >= 25  # of 40 tokens
    assert max(accepted[1], accepted[3]) <= 5
