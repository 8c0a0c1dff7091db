"""Prompt scores: computed without the prefix cache, emitted once, and possible without output."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ContextTooLong, InvalidParameter, WorkerError
from quire.base.records import FinishReason, PromptScores, RowError, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from tests.cases import each_case
from tests.unit.scheduler.fake_worker import alone_scores, make_request
from tests.unit.scheduler.harness import Harness, Setup


def _run(harness: Harness, name: str, prompt: range, **parameters: Any) -> list[StepPlan]:
    """Return the plans from add to end."""
    before = len(harness.plans)
    harness.add(make_request(name, prompt, **{"max_tokens": 2, **parameters}))
    harness.drain()
    return harness.plans[before:]


def test_a_scored_prompt_uses_no_prefix_and_leaves_one_for_others() -> None:
    harness = Harness(Setup())
    _run(harness, "a", range(12))
    plans = _run(harness, "b", range(12), prompt_logprobs=0)
    assert [plan.num_tokens for plan in plans] == [12, 1]
    assert harness.ends["b"].cached_tokens == 0
    assert harness.scheduler.stats().prefix_queried_tokens_total == 12  # not counted as a miss
    _run(harness, "c", range(20, 32), prompt_logprobs=0)
    _run(harness, "d", range(20, 32))
    assert harness.ends["d"].cached_tokens == 12
    assert harness.scores.keys() == {"b", "c"}
    harness.check_end()


@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
def test_the_scores_of_a_chunked_prompt_are_emitted_together(plans_in_flight: int) -> None:
    harness = Harness(Setup(max_num_batched_tokens=5, plans_in_flight=plans_in_flight))
    _run(harness, "a", range(23), prompt_logprobs=1)
    assert len(harness.scores["a"]) == 22
    harness.check_end()


@each_case("plans_in_flight", [1, 2, 3])
@each_case("num_tokens", [1, 2, 4, 5, 8, 13])
def test_a_request_without_output_is_computed_once_and_samples_nothing(
    plans_in_flight: int, num_tokens: int
) -> None:
    harness = Harness(Setup(max_num_batched_tokens=4, plans_in_flight=plans_in_flight))
    plans = _run(harness, "a", range(num_tokens), max_tokens=0, prompt_logprobs=0)
    assert sum(plan.num_tokens for plan in plans) == num_tokens
    assert not any(plan.samples.any() for plan in plans)
    end = harness.ends["a"]
    assert (end.finish_reason, end.token_ids) == (FinishReason.LENGTH, ())
    assert end.times is not None
    assert math.isnan(end.times.first_token_ms)
    assert end.times.last_token_ms > end.times.arrival_ms
    assert len(harness.scores["a"]) == num_tokens - 1
    harness.check_end()


def test_requests_without_output_run_beside_others() -> None:
    harness = Harness(Setup(max_num_batched_tokens=6))
    for number in range(8):
        only = number % 2 == 0
        prompt = range(number, number + 7)
        harness.add(
            make_request(
                f"r{number}", prompt, max_tokens=0 if only else 9, prompt_logprobs=0, seed=number
            )
        )
    harness.drain()
    assert len(harness.scores) == 8
    harness.check_end()


def test_the_prompt_of_a_request_without_output_may_fill_the_context() -> None:
    def add(num_tokens: int, **sizes: int) -> None:
        numbers = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32} | sizes
        cache = CacheManager(4, 4, prefix_caching=True)
        request = make_request("a", range(num_tokens), max_tokens=0, prompt_logprobs=0)
        Scheduler(SchedulerLimits(**numbers), cache, FirstCome()).add(request)

    add(16)
    with pytest.raises(ContextTooLong, match=r"17 tokens; the KV cache holds 16"):
        add(17)
    add(12, max_model_len=12)
    with pytest.raises(ContextTooLong, match=r"13 tokens; the context length is 12"):
        add(13, max_model_len=12)


def test_zero_output_tokens_are_rejected_if_something_is_to_be_generated() -> None:
    harness = Harness(Setup())
    request = make_request("a", range(4), max_tokens=0, prompt_logprobs=0)
    wrong = replace(request, sampling=SamplingParams(seed=0, prompt_logprobs=0, max_tokens=5))
    with pytest.raises(InvalidParameter, match="room for at least one"):
        harness.scheduler.add(wrong)


def test_only_the_leader_of_a_group_emits_scores() -> None:
    harness = Harness(Setup())
    for stream in range(3):
        request = make_request(
            f"a{stream}", range(9), max_tokens=4, group="a", stream=stream, prompt_logprobs=1
        )
        harness.add(request)
    harness.drain()
    assert harness.scores.keys() == {"a0"}
    assert sum(plan.num_tokens for plan in harness.plans) == 9 + 2 + 9  # forks: the last token
    harness.check_end()


def test_the_next_stream_scores_the_prompt_if_the_leader_is_aborted_before() -> None:
    harness = Harness(Setup(max_num_batched_tokens=4))
    for stream in range(3):
        request = make_request(
            f"a{stream}", range(9), max_tokens=4, group="a", stream=stream, prompt_logprobs=1
        )
        harness.add(request)
    harness.step()
    harness.abort("a0")
    harness.drain()
    assert harness.scores.keys() == {"a1"}
    harness.check_end()


def test_a_half_scored_prompt_continues_after_preemption() -> None:
    harness = Harness(Setup(num_blocks=8, block_size=4, max_num_batched_tokens=6, max_num_seqs=2))
    harness.add(make_request("old", range(4), max_tokens=25))
    harness.step()
    harness.add(make_request("new", range(30, 50), max_tokens=0, prompt_logprobs=0))
    harness.step()
    slot = harness.scheduler._requests.sequences["new"].slot
    assert harness.scheduler._requests.sequences["new"].num_scored == 5
    harness.scheduler._preemptor.preempt(slot)
    harness.drain()
    again = [
        admission
        for plan in harness.plans
        for admission in plan.admissions
        if admission.request_id == "new"
    ]
    assert [admission.scores_from for admission in again] == [0, 5]
    assert harness.scores["new"] == alone_scores(harness.requests["new"])
    harness.check_end()


def _scored(plan: StepPlan, counts: list[int], width: int = 0, **changes: Any) -> StepResult:
    num_scored = sum(counts)
    sampled = np.zeros(int(plan.samples.sum()), np.int32)
    result = StepResult(
        step=plan.step,
        token_counts=plan.samples.astype(np.int32),
        token_ids=sampled,
        score_counts=np.array(counts, np.int32),
        scores=PromptScores(
            logprobs=np.arange(num_scored, dtype=np.float32),
            ranks=np.arange(num_scored, dtype=np.int32),
            top_ids=np.tile(np.arange(width, dtype=np.int32), (num_scored, 1)),
            top_logprobs=np.zeros((num_scored, width), np.float32),
        ),
    )
    return replace(result, **changes)


def _planned(*wanted: int | None) -> tuple[Scheduler, StepPlan]:
    """Add prompts of 4 tokens, each with so many alternatives."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    engine = Scheduler(limits, CacheManager(32, 4, prefix_caching=True), FirstCome())
    for name, prompt_logprobs in zip("abcd", wanted, strict=False):
        engine.add(
            make_request(name, [ord(name)] * 4, max_tokens=3, prompt_logprobs=prompt_logprobs)
        )
    plan = engine.schedule(0.0)
    assert plan is not None
    return engine, plan


def test_each_request_gets_its_own_number_of_alternatives() -> None:
    engine, plan = _planned(2, None, 0, 5)
    scores_by_id = {
        output.request_id: output.scores
        for output in engine.update(plan, _scored(plan, [3, 0, 3, 3], width=5), 0.0)
    }
    assert scores_by_id["b"] is None
    shapes = {
        name: scores.top_ids.shape for name, scores in scores_by_id.items() if scores is not None
    }
    assert shapes == {"a": (3, 2), "c": (3, 0), "d": (3, 5)}
    assert scores_by_id["d"] is not None
    assert scores_by_id["d"].ranks.tolist() == [6, 7, 8]


def test_scores_of_failed_or_aborted_rows_are_dropped() -> None:
    engine, plan = _planned(0, 0, 0)
    engine.abort("b")
    counts = plan.samples.astype(np.int32)
    counts[0] = 0
    result = _scored(
        plan,
        [0, 3, 3],
        token_counts=counts,
        token_ids=np.zeros(2, np.int32),
        errors=(RowError(row=0, message="it failed"),),
    )
    told = {output.request_id: output.scores for output in engine.update(plan, result, 0.0)}
    assert told["a"] is None
    assert told["c"] is not None
    assert told["c"].ranks.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("counts", "words"),
    [([3], "counts of 1 rows"), ([3, 2, 1], "counts of 3 rows"), ([3, 2], "2 of 3 prompt tokens")],
)
def test_scores_that_do_not_match_the_plan_end_the_engine(counts: list[int], words: str) -> None:
    engine, plan = _planned(0, 0)
    with pytest.raises(WorkerError, match=words):
        engine.update(plan, _scored(plan, counts), 0.0)
