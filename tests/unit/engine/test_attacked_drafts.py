"""Requests with drafts under stress: failing proposers, cancelled requests, grammars, and engines
that end while drafts are verified. The draft model is the model itself, so that all drafts are
right and runs are long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.base.grammar import json_schema
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.speculative.control import AdaptiveControl
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter

OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
SETTINGS: dict[str, Any] = {"threads": 1, "max_num_seqs": 4, "max_model_len": 128}
PROMPTS = [[5, 6, 7, 8, 9] * 4, [20, 21, 22], [5, 6, 7, 8]]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=40, seed=3, frequency_penalty=0.4, n=2),
    SamplingParams(temperature=0.7, max_tokens=30, seed=4, min_tokens=9, top_k=3),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"enum": [10, 20]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, speculate="draft", draft_model=str(model), **SETTINGS) as made:
        yield made


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Verify all drafts, whatever they cost on this machine; return how many are accepted."""
    verified, counts = Drafter.verified, list[int]()

    def watched(self: Drafter, index: Any, drafted: Any, good: Any) -> None:
        counts.append(int(good.sum()))
        verified(self, index, drafted, good)

    monkeypatch.setattr(Drafter, "verified", watched)
    monkeypatch.setattr(AdaptiveControl, "limits", lambda self, slots, limits, *cost: limits)
    monkeypatch.setattr(DraftBalance, "_add", lambda *given: None)
    monkeypatch.setattr(DraftBalance, "affords", lambda _, behind_ms, step_ms: behind_ms >= 0.0)
    return counts


def answers(llm: LLM, terms: SchedulingParams | None = None) -> list[tuple[object, ...]]:
    return [
        (answer.token_ids, [token.logprob for token in answer.logprobs], answer.finish_reason)
        for one in llm.generate(PROMPTS, SAMPLING, terms=terms)
        for answer in one.outputs
    ]


@pytest.mark.parametrize("method", ["propose", "verified", "possible", "end"])
def test_a_proposer_that_begins_to_fail_within_answers_changes_none(
    llm: LLM, accepted: list[int], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    plain, real, calls = answers(llm, OFF), getattr(ModelProposer, method), [0]
    assert not accepted

    def fails_later(self: ModelProposer, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise RuntimeError("no more")
        return real(self, *given)

    with monkeypatch.context() as planted:
        planted.setattr(ModelProposer, method, fails_later)
        assert answers(llm) == plain
    assert calls[0] > 3
    accepted.clear()
    assert answers(llm) == plain  # later requests have drafts again
    assert sum(accepted) > 40


def test_grammars_force_tokens_among_drafts(llm: LLM, accepted: list[int]) -> None:
    sampling = [
        SamplingParams(
            temperature=temperature,
            seed=5,
            max_tokens=80,
            logprobs=0,
            structured_outputs=json_schema(SCHEMA),
        )
        for temperature in (0.0, 0.8)
    ]
    prompts = PROMPTS[:2]

    def said(terms: Any) -> list[tuple[object, ...]]:
        return [
            (one.token_ids, one.text, [token.logprob for token in one.logprobs])
            for (one,) in (each.outputs for each in llm.generate(prompts, sampling, terms=terms))
        ]

    plain = said(OFF)
    assert not accepted
    assert said(None) == plain
    right = [
        SchedulingParams(speculation=SpeculationParams(prediction_ids=tuple(ids)))
        for ids, *_ in plain
    ]
    accepted.clear()
    assert said(right) == plain
    assert sum(accepted) > 10
    wrong = [
        SchedulingParams(speculation=SpeculationParams(prediction_ids=tuple(reversed(ids))))
        for ids, *_ in plain
    ]
    assert said(wrong) == plain


def test_requests_that_are_cancelled_while_drafts_are_verified_leave_nothing(
    model: Path, accepted: list[int]
) -> None:
    async def story() -> None:
        settings = {**SETTINGS, "plans_in_flight": 2, "draft_model": str(model)}
        async with AsyncLLM(model, speculate="draft", **settings) as llm:

            async def one(number: int, tokens: int) -> list[int]:
                sampling = replace(SAMPLING[0], max_tokens=60, seed=number)
                found: list[int] = []
                async with aclosing(llm.generate(PROMPTS[number % 3], sampling)) as deltas:
                    async for delta in deltas:
                        found += delta.token_ids
                        if len(found) >= tokens:
                            break
                return found

            whole = await one(0, 60)
            found = await asyncio.gather(*(one(number, 2 + 7 * number) for number in range(8)))
            assert all(whole[: len(ids)] == ids for ids in found[::3])
            assert await one(0, 60) == whole
            while llm.client.stats.running:
                await asyncio.sleep(0.005)
            assert llm.client.stats.blocks_used == 0

    asyncio.run(story())
    assert sum(accepted) > 60


def test_an_engine_that_starts_again_drafts_again(model: Path, accepted: list[int]) -> None:
    """Sleep and wake end an engine and start another one: nothing of a draft model is left."""
    found = []
    for _ in range(2):
        with LLM(model, speculate="draft", draft_model=str(model), **SETTINGS) as llm:
            found.append(answers(llm))
            assert sum(accepted) > 40
            accepted.clear()
    assert found[0] == found[1]
