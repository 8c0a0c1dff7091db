"""Scheduler: the content of plans, ends of requests, and rejections."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from quire.base.errors import ContextTooLong, InvalidParameter, OverloadedError, WorkerError
from quire.base.records import FinishReason, RowError, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from tests.unit.scheduler.fake_worker import alone, make_request
from tests.unit.scheduler.harness import Harness, Setup


def answer(plan: StepPlan, *token_ids: int, errors: tuple[RowError, ...] = ()) -> StepResult:
    """Return a result with these tokens, one for each row that samples and has no error."""
    failed = [error.row for error in errors]
    counts = plan.samples.astype(np.int32)
    counts[failed] = 0
    return StepResult(
        step=plan.step,
        token_counts=counts,
        token_ids=np.array(token_ids, np.int32),
        errors=errors,
    )


def scheduler(**sizes: int) -> Scheduler:
    """Return a small scheduler."""
    numbers = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32} | sizes
    return Scheduler(
        SchedulerLimits(**numbers), CacheManager(32, 4, prefix_caching=True), FirstCome()
    )


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def test_a_prompt_is_computed_in_chunks_and_only_the_last_samples() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    engine.add(make_request("a", range(10), max_tokens=3))
    seen = []
    for tokens in ((), (), (5,)):
        plan = plan_of(engine)
        seen.append((plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()))
        engine.update(plan, answer(plan, *tokens), 0.0)
    assert seen == [([0], [4], [False]), ([4], [4], [False]), ([8], [2], [True])]


def test_after_the_prompt_a_step_computes_the_token_just_sampled() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(5), max_tokens=4))
    plan = plan_of(engine)
    engine.update(plan, answer(plan, 7), 0.0)
    plan = plan_of(engine)
    assert (plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist()) == ([5], [1], [True])
    assert plan.admissions == ()


def test_running_requests_come_before_waiting_ones_and_in_order() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    engine.add(make_request("a", range(4), max_tokens=4))
    engine.add(make_request("b", range(50, 60), max_tokens=4))
    plan = plan_of(engine)
    assert [admission.request_id for admission in plan.admissions] == ["a", "b"]
    assert plan.counts.tolist() == [4, 2]
    engine.add(make_request("c", range(3), max_tokens=4))
    engine.update(plan, answer(plan, 9), 0.0)
    plan = plan_of(engine)
    assert plan.starts.tolist() == [4, 2]
    assert plan.counts.tolist() == [1, 5]
    assert plan.admissions == ()


def test_with_two_plans_in_flight_the_next_token_is_scheduled_before_it_is_known() -> None:
    engine = scheduler(plans_in_flight=2)
    engine.add(make_request("a", range(5), max_tokens=4))
    first, second = plan_of(engine), plan_of(engine)
    assert first.samples.tolist() == second.samples.tolist() == [True]
    assert second.starts.tolist() == [5]
    assert engine.schedule(0.0) is None
    assert [o.token_ids for o in engine.update(first, answer(first, 8), 0.0)] == [(8,)]
    assert [o.token_ids for o in engine.update(second, answer(second, 9), 0.0)] == [(9,)]


def test_no_plan_exceeds_a_requests_token_limit() -> None:
    engine = scheduler(plans_in_flight=3)
    engine.add(make_request("a", range(5), max_tokens=2))
    plans = [plan_of(engine), plan_of(engine)]
    assert engine.schedule(0.0) is None
    engine.update(plans[0], answer(plans[0], 8), 0.0)
    (output,) = engine.update(plans[1], answer(plans[1], 9), 0.0)
    assert output.finish_reason is FinishReason.LENGTH
    assert not engine.has_work


def test_a_stop_id_ends_a_request_and_drops_later_results() -> None:
    engine = scheduler(plans_in_flight=2)
    engine.add(make_request("a", range(5), max_tokens=9, stop_ids=(3, 6)))
    engine.add(make_request("b", range(20, 25), max_tokens=9, stop_ids=(8,)))
    first, second = plan_of(engine), plan_of(engine)
    outputs = {o.request_id: o for o in engine.update(first, answer(first, 6, 6), 0.0)}
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert outputs["a"].stop_id == 6
    assert outputs["a"].token_ids == (6,)
    assert outputs["b"].finish_reason is None
    (output,) = engine.update(second, answer(second, 7, 9), 0.0)
    assert (output.request_id, output.token_ids) == ("b", (9,))


def test_a_stop_id_at_the_last_allowed_token_counts_as_stop() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(5), max_tokens=1, stop_ids=(6,)))
    plan = plan_of(engine)
    (output,) = engine.update(plan, answer(plan, 6), 0.0)
    assert output.finish_reason is FinishReason.STOP


def test_a_retired_slot_is_reported_once_and_reused_by_the_next_plan() -> None:
    engine = scheduler(max_num_seqs=1)
    engine.add(make_request("a", range(5), max_tokens=1))
    engine.add(make_request("b", range(6), max_tokens=2))
    plan = plan_of(engine)
    engine.update(plan, answer(plan, 6), 0.0)
    plan = plan_of(engine)
    assert plan.retired.tolist() == [0]
    assert [(a.slot, a.request_id) for a in plan.admissions] == [(0, "b")]
    engine.update(plan, answer(plan, 6), 0.0)
    assert plan_of(engine).retired.tolist() == []


def test_results_of_a_slots_former_request_are_dropped() -> None:
    engine = scheduler(max_num_seqs=1, plans_in_flight=2)
    engine.add(make_request("a", range(5), max_tokens=5))
    first = plan_of(engine)
    assert engine.abort("a") is not None
    engine.add(make_request("b", range(7), max_tokens=5))
    second = plan_of(engine)
    assert [a.request_id for a in second.admissions] == ["b"]
    assert list(engine.update(first, answer(first, 9), 0.0)) == []
    (output,) = engine.update(second, answer(second, 4), 0.0)
    assert (output.request_id, output.token_ids) == ("b", (4,))


def test_abort_works_at_any_moment_and_frees_everything() -> None:
    for moment in ("waiting", "in flight", "mid-prompt", "between tokens"):
        harness = Harness(Setup(max_num_batched_tokens=4, num_blocks=8))
        harness.add(make_request("a", range(9), max_tokens=9))
        if moment != "waiting":
            harness.schedule()
        if moment in ("mid-prompt", "between tokens"):
            harness.update()
        if moment == "between tokens":
            for _ in range(4):
                harness.step()
        harness.abort("a")
        harness.abort("a")
        harness.drain()
        harness.check_end()


def test_an_unknown_request_cannot_be_aborted() -> None:
    assert scheduler().abort("nobody") is None


def test_a_failed_row_ends_only_its_request() -> None:
    engine = scheduler()
    for name in "abc":
        engine.add(make_request(name, [ord(name)] * 4, max_tokens=3))
    plan = plan_of(engine)
    result = answer(plan, 5, 7, errors=(RowError(row=1, message="logits are NaN"),))
    outputs = {output.request_id: output for output in engine.update(plan, result, 0.0)}
    assert outputs["b"].finish_reason is FinishReason.ERROR
    assert outputs["b"].error == "logits are NaN"
    assert outputs["b"].token_ids == ()
    assert outputs["a"].token_ids == (5,)
    assert outputs["c"].token_ids == (7,)
    assert engine.stats().row_errors_total == 1
    assert len(plan_of(engine).slots) == 2


def test_an_error_of_an_ended_request_is_dropped() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(4), max_tokens=3))
    plan = plan_of(engine)
    engine.abort("a")
    result = answer(plan, errors=(RowError(row=0, message="late"),))
    assert list(engine.update(plan, result, 0.0)) == []
    assert engine.stats().row_errors_total == 0


def test_a_result_that_does_not_match_the_plan_is_a_worker_error() -> None:
    engine = scheduler(plans_in_flight=2)
    engine.add(make_request("a", range(4), max_tokens=3))
    plan, later = plan_of(engine), plan_of(engine)
    good = answer(plan, 5)
    with pytest.raises(WorkerError, match="out of order"):
        engine.update(later, answer(later, 5), 0.0)
    with pytest.raises(WorkerError, match="in order"):
        engine.update(plan, answer(later, 5), 0.0)
    with pytest.raises(WorkerError, match="0 tokens"):
        engine.update(plan, answer(plan), 0.0)
    none = StepResult(step=1, token_counts=good.token_counts * 0, token_ids=good.token_ids)
    with pytest.raises(WorkerError, match="planned in rows"):
        engine.update(plan, none, 0.0)
    assert len(engine.update(plan, good, 0.0)) == 1


def test_a_request_that_can_never_fit_is_rejected_with_both_numbers() -> None:
    engine = scheduler()
    with pytest.raises(ContextTooLong, match=r"32 tokens.*context length is 32"):
        engine.add(make_request("a", range(32), max_tokens=1))
    tiny = Scheduler(
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32),
        CacheManager(4, 4, prefix_caching=True),
        FirstCome(),
    )
    with pytest.raises(ContextTooLong, match=r"16 tokens.*KV cache holds 16"):
        tiny.add(make_request("a", range(16), max_tokens=1))
    tiny.add(make_request("b", range(15), max_tokens=1))


def test_invalid_requests_are_rejected_by_name() -> None:
    engine = scheduler()
    with pytest.raises(InvalidParameter, match="no tokens"):
        engine.add(make_request("a", [], max_tokens=1))
    with pytest.raises(InvalidParameter, match="room for at least one"):
        engine.add(make_request("a", range(4), max_tokens=0))
    engine.add(make_request("a", range(4), max_tokens=1))
    with pytest.raises(InvalidParameter, match="'a' is in use"):
        engine.add(make_request("a", range(4), max_tokens=1))


def test_a_full_queue_rejects_with_its_length() -> None:
    engine = scheduler(max_queued_requests=2, max_num_seqs=1)
    for name in "abc":  # one can start at once
        engine.add(make_request(name, range(4), max_tokens=9))
    with pytest.raises(OverloadedError, match="3 requests are waiting, at most 2"):
        engine.add(make_request("d", range(4), max_tokens=1))
    plan_of(engine)
    with pytest.raises(OverloadedError, match="2 requests are waiting, at most 2"):
        engine.add(make_request("d", range(4), max_tokens=1))
    engine.abort("b")
    engine.add(make_request("d", range(4), max_tokens=1))


def test_requests_that_can_start_at_once_are_accepted_and_not_counted_as_waiting() -> None:
    engine = scheduler(max_queued_requests=1, max_num_seqs=8)
    for number in range(9):
        engine.add(make_request(f"r{number}", range(4), max_tokens=1))
    with pytest.raises(OverloadedError):
        engine.add(make_request("r9", range(4), max_tokens=1))


def test_more_streams_than_slots_are_always_a_client_error() -> None:
    engine = scheduler(max_queued_requests=1, max_num_seqs=2)
    sampling = SamplingParams(n=4, seed=0, max_tokens=1)
    four = replace(make_request("a", range(4), max_tokens=1), sampling=sampling)
    for name in "bcd":
        with pytest.raises(InvalidParameter, match=r"n is 4; 2 may run and 1 may wait") as refused:
            engine.add(four)
        assert refused.value.param == "n"
        engine.add(make_request(name, range(4), max_tokens=1))


def test_limits_below_one_are_rejected_by_name() -> None:
    with pytest.raises(InvalidParameter, match="max_num_seqs is 0"):
        scheduler(max_num_seqs=0)
    with pytest.raises(InvalidParameter, match="no cost model"):
        scheduler(step_budget_ms=5)


def test_first_token_and_end_are_events_with_times_and_the_rest_are_rows() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(5), max_tokens=3, arrival_ms=1.0))
    records = []
    for now_ms, token_id in ((10.0, 7), (20.0, 8), (30.0, 9)):
        plan = engine.schedule(now_ms)
        assert plan is not None
        records.append(engine.update(plan, answer(plan, token_id), now_ms + 5.0))
    first, plain, last = records
    assert (len(first.events), len(plain.events), len(last.events)) == (1, 0, 1)
    assert plain.request_ids == ["a"]
    assert plain.token_ids.tolist() == [8]
    times = first.events[0].times
    assert times is not None
    assert (times.arrival_ms, times.first_scheduled_ms, times.first_token_ms) == (1.0, 10.0, 15.0)
    times = last.events[0].times
    assert times is not None
    assert (times.first_token_ms, times.last_token_ms) == (15.0, 35.0)


def test_an_abort_reports_the_time_of_the_last_token() -> None:
    engine = scheduler()
    engine.add(make_request("a", range(5), max_tokens=9))
    for now_ms in (10.0, 20.0):
        plan = plan_of(engine)
        engine.update(plan, answer(plan, 7), now_ms)
    output = engine.abort("a")
    assert output is not None
    assert output.times is not None
    assert (output.times.first_token_ms, output.times.last_token_ms) == (10.0, 20.0)
    engine.add(make_request("b", range(5), max_tokens=9))
    output = engine.abort("b")
    assert output is not None
    assert output.times is not None
    assert math.isnan(output.times.first_token_ms)


def test_logprobs_stay_with_their_rows_when_others_are_dropped() -> None:
    engine = scheduler()
    for name in "abc":
        engine.add(make_request(name, [ord(name)] * 4, max_tokens=3))
    for turn in range(2):
        plan = plan_of(engine)
        result = StepResult(
            step=plan.step,
            token_counts=np.ones(3, np.int32),
            token_ids=np.array([1, 2, 3], np.int32),
            logprobs=np.array([-1.0, np.nan, -3.0], np.float32),
            top_ids=np.array([[10, -1], [-1, -1], [30, 31]], np.int32),
            top_logprobs=np.array([[-0.5, np.nan], [np.nan, np.nan], [-1, -2]], np.float32),
        )
        if turn == 1:
            engine.abort("a")
        outputs = {o.request_id: o for o in engine.update(plan, result, 0.0)}
        assert outputs.keys() == ({"a", "b", "c"} if turn == 0 else {"b", "c"})
        assert outputs["b"].logprobs == ()
        (entry,) = outputs["c"].logprobs
        assert (entry.token_id, entry.logprob) == (3, -3.0)
        assert entry.top == ((30, -1.0), (31, -2.0))
        if turn == 0:
            assert outputs["a"].logprobs[0].top == ((10, -0.5),)


def test_stats_count_events() -> None:
    engine = scheduler(max_num_seqs=1)
    engine.add(make_request("a", range(5), max_tokens=2))
    engine.add(make_request("b", range(5), max_tokens=2))
    plan = plan_of(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_total, stats.blocks_used) == (1, 1, 32, 2)
    engine.update(plan, answer(plan, 7), 12.0)
    stats = engine.stats()
    assert (stats.steps_total, stats.step_rows, stats.step_tokens) == (1, 1, 5)
    assert stats.last_step_ms == 12.0
    plan = plan_of(engine)
    engine.update(plan, answer(plan, 7), 13.0)
    assert engine.stats().blocks_cached == 1
    plan_of(engine)
    stats = engine.stats()
    assert (stats.prefix_queried_tokens_total, stats.prefix_hit_tokens_total) == (10, 4)


def test_equal_histories_give_equal_plans() -> None:
    def plans() -> list[StepPlan]:
        harness = Harness(Setup(num_blocks=8, plans_in_flight=2))
        for number in range(5):
            harness.add(make_request(f"r{number}", range(number + 4), max_tokens=9, seed=number))
        harness.drain()
        return harness.plans

    for one, other in zip(plans(), plans(), strict=True):
        for name in ("slots", "starts", "counts", "store_from", "samples", "table_blocks"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_requests_beyond_a_small_token_budget_all_finish_with_their_own_tokens() -> None:
    harness = Harness(Setup(max_num_seqs=8, max_num_batched_tokens=3, num_blocks=64))
    for number in range(8):
        harness.add(make_request(f"r{number}", range(number, number + 6), max_tokens=6))
    harness.drain()
    harness.check_end()
    request = harness.requests["r3"]
    assert harness.tokens["r3"] == alone(request, harness.limit(request))


def test_host_time_between_steps_is_learned_and_idle_time_is_not() -> None:
    """A client also waits for the host's work between two steps."""
    harness = Harness(Setup(max_model_len=64))
    noted: list[float] = []
    harness.scheduler.speed.note = lambda plan, heads, ms: noted.append(ms)  # type: ignore[method-assign]
    for name in ("a", "b"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=4))
        while harness.scheduler.has_work:
            harness.now_ms += 30.0  # the host is busy, then a step begins
            harness.schedule()
            harness.update()
        harness.now_ms += 1000.0  # nothing to do
    assert noted == [1.0, 32.0, 32.0, 32.0] * 2


def test_stats_count_free_reserved_and_allocated_blocks_and_busy_time() -> None:
    harness = Harness(Setup(num_blocks=16, block_size=4, max_num_batched_tokens=8))
    harness.add(make_request("a", list(range(10)), max_tokens=4))
    harness.add(make_request("b", list(range(9)), max_tokens=4))
    harness.schedule()  # eight of the first prompt's ten tokens
    stats = harness.scheduler.stats()
    assert (stats.blocks_free, stats.blocks_reserved, stats.allocated_blocks_total) == (14, 1, 2)
    harness.update()
    assert harness.scheduler.stats().device_busy_ms_total == 1.0
    harness.now_ms += 50.0  # no plan is in flight
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.device_busy_ms_total == stats.steps_total
    assert (stats.blocks_free, stats.blocks_reserved) == (16, 0)
