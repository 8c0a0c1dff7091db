"""Runs of several tokens per row: taken whole, cut at the end, or left to other plans."""

import numpy as np
import pytest

from quire.base.errors import WorkerError
from quire.base.records import FinishReason, RequestOutput, StepPlan, StepResult
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from tests.unit.scheduler.fake_worker import make_request


def scheduler(plans_in_flight: int = 1) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        plans_in_flight=plans_in_flight,
    )
    return Scheduler(limits, CacheManager(32, 4, prefix_caching=True), FirstCome())


def runs(plan: StepPlan, *each: tuple[int, ...]) -> StepResult:
    """Return a result with one run per row and a log-probability of -id per token."""
    ids = np.array([id_ for run in each for id_ in run], np.int32)
    return StepResult(
        step=plan.step,
        token_counts=np.array([len(run) for run in each], np.int32),
        token_ids=ids,
        logprobs=-ids.astype(np.float32),
    )


def after_prompts(engine: Scheduler, *names: str, **more: object) -> StepPlan:
    for name in names:
        engine.add(make_request(name, [ord(name)] * 4, **more))
    plan = engine.schedule(0.0)
    assert plan is not None
    assert plan.sample_counts.tolist() == [1] * len(names)
    return plan


def by_id(engine: Scheduler, plan: StepPlan, result: StepResult) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in engine.update(plan, result, 0.0)}


def test_a_run_is_one_output_and_the_next_step_follows_it() -> None:
    engine = scheduler()
    plan = after_prompts(engine, "a", "b", max_tokens=9)
    outputs = by_id(engine, plan, runs(plan, (5, 6, 7), (8,)))
    assert outputs["a"].token_ids == (5, 6, 7)
    assert outputs["b"].token_ids == (8,)
    assert [one.logprob for one in outputs["a"].logprobs] == [-5.0, -6.0, -7.0]
    assert [one.logprob for one in outputs["b"].logprobs] == [-8.0]
    following = engine.schedule(0.0)
    assert following is not None
    assert (following.starts + following.counts).tolist() == [7, 5]


def test_a_run_ends_at_a_stop_token_or_the_limit() -> None:
    engine = scheduler()
    plan = after_prompts(engine, "a", max_tokens=9, stop_ids=(6,))
    (output,) = engine.update(plan, runs(plan, (5, 6, 7)), 0.0)
    assert (output.token_ids, output.stop_id) == ((5, 6), 6)
    assert output.finish_reason is FinishReason.STOP
    assert [one.token_id for one in output.logprobs] == [5, 6]
    plan = after_prompts(engine, "b", max_tokens=2)
    (output,) = engine.update(plan, runs(plan, (5, 6, 7)), 0.0)
    assert (output.token_ids, output.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_the_tail_of_a_run_is_left_to_the_plans_in_flight() -> None:
    engine = scheduler(plans_in_flight=2)
    first = after_prompts(engine, "a", max_tokens=9)
    second = engine.schedule(0.0)
    assert second is not None
    (output,) = engine.update(first, runs(first, (5, 6, 7)), 0.0)
    assert output.token_ids == (5,)
    (output,) = engine.update(second, runs(second, (6, 7)), 0.0)
    assert output.token_ids == (6, 7)


def test_runs_of_other_rows_stay_aligned_when_a_request_has_left() -> None:
    engine = scheduler()
    plan = after_prompts(engine, "a", "b", max_tokens=9)
    engine.abort("a")
    outputs = by_id(engine, plan, runs(plan, (5, 6), (7, 8)))
    assert outputs.keys() == {"b"}
    assert outputs["b"].token_ids == (7, 8)
    assert [one.logprob for one in outputs["b"].logprobs] == [-7.0, -8.0]


def test_a_run_that_is_missing_is_a_worker_error() -> None:
    engine = scheduler()
    plan = after_prompts(engine, "a", "b", max_tokens=9)
    with pytest.raises(WorkerError, match=r"planned in rows \[1\]"):
        engine.update(plan, runs(plan, (5, 6), ()), 0.0)
