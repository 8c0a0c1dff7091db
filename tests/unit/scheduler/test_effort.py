"""Cost follows change: the work of a steady step does not grow with the number of requests."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np

from quire.base.records import StepPlan, StepResult
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.policy.policy import Policy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.tenants.tenant_usage import TenantLimits
from tests.unit.scheduler.fake_worker import make_request


def steady(
    running: int,
    *,
    waiting: int = 0,
    policy: Policy | None = None,
    tenants: tuple[TenantLimits, ...] = (),
) -> Scheduler:
    """Return `running` decoding requests of staggered lengths, and as many waiting for a slot."""
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=256),
        CacheManager(running * 16, 16, prefix_caching=True),
        policy or FirstCome(),
        tenants=tenants,
    )
    for number in range(running + waiting):
        prompt = [number, *range(number % 16 + 1)]
        scheduler.add(make_request(f"r{number}", prompt, max_tokens=200, stop_ids=(900, 901)))
    for _ in range(3):
        turn(scheduler)
    return scheduler


def turn(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(plan, result_of(plan), 0.0)
    return plan


def result_of(plan: StepPlan) -> StepResult:
    counts = plan.samples.astype(np.int32)
    return StepResult(
        step=plan.step, token_counts=counts, token_ids=np.full(counts.sum(), 7, np.int32)
    )


def calls_of_a_turn(scheduler: Scheduler) -> int:
    """Return calls of Python and C functions in schedule and update."""
    count = 0

    def tracer(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tracer)
    try:
        plan = scheduler.schedule(0.0)
    finally:
        sys.setprofile(before)
    assert plan is not None
    result = result_of(plan)
    sys.setprofile(tracer)
    try:
        scheduler.update(plan, result, 0.0)
    finally:
        sys.setprofile(before)
    return count


def test_a_steady_step_makes_equally_many_calls_for_16_and_for_512_requests() -> None:
    few, many = steady(16), steady(512)
    counts = {calls_of_a_turn(few), calls_of_a_turn(many)}
    assert len(counts) == 1
    assert counts.pop() <= 120


def test_a_steady_step_makes_equally_many_calls_for_few_and_many_limited_tenants() -> None:
    tenants = (
        TenantLimits(name="", shown="default", ceiling_blocks=100_000, max_running=600),
        TenantLimits(name="a", shown="a", floor_blocks=16),
    )
    few, many = steady(16, tenants=tenants), steady(512, tenants=tenants)
    counts = {calls_of_a_turn(few), calls_of_a_turn(many)}
    assert len(counts) == 1
    assert counts.pop() <= 160


def test_a_tenant_waiting_at_its_limit_adds_no_cost_to_a_steady_step() -> None:
    full = (TenantLimits(name="", shown="default", max_running=8),)
    assert calls_of_a_turn(steady(16, waiting=200, tenants=full)) == calls_of_a_turn(
        steady(16, waiting=20, tenants=full)
    )


def test_a_blocked_queue_adds_no_cost_to_a_steady_step() -> None:
    assert calls_of_a_turn(steady(16, waiting=200)) == calls_of_a_turn(steady(16))


def test_a_steady_step_touches_no_sequence_state_and_makes_no_output_object() -> None:
    scheduler = steady(64)
    batch = scheduler._batch

    class Untouchable(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError(f"sequence {index} was touched")

        def __iter__(self) -> Any:
            raise AssertionError("sequences were walked")

    batch.sequences = Untouchable(batch.sequences)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    outputs = scheduler.update(plan, result_of(plan), 0.0)
    assert outputs.events == ()
    assert len(outputs.request_ids) == 64


def test_names_are_gathered_again_only_after_an_arrival_or_an_end() -> None:
    scheduler = steady(8)
    names = []
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        names.append(scheduler.update(plan, result_of(plan), 0.0).request_ids)
    assert names[0] is names[1] is names[2]
    scheduler.abort("r3")
    plan = scheduler.schedule(0.0)
    assert plan is not None
    outputs = scheduler.update(plan, result_of(plan), 0.0)
    assert outputs.request_ids == [name for name in names[0] if name != "r3"]


def test_block_crossings_of_a_step_are_allocated_together() -> None:
    scheduler = steady(64)
    allocations = []
    allocate = scheduler._cache.allocate

    def counting(slots: Any, added: Any) -> Any:
        allocations.append(added.tolist())
        return allocate(slots, added)

    scheduler._cache.allocate = counting  # type: ignore[method-assign]
    for _ in range(16):
        turn(scheduler)
    assert allocations == [[1] * 4] * 16


def test_a_steady_step_registers_no_blocks() -> None:
    scheduler = steady(16)
    scheduler._cache.register = None  # type: ignore[assignment,method-assign]
    for _ in range(40):
        turn(scheduler)


def test_a_step_without_a_watched_stop_id_compares_no_stop_lists() -> None:
    scheduler = steady(16)
    scheduler._batch._stop_ids = None  # type: ignore[assignment]
    turn(scheduler)
