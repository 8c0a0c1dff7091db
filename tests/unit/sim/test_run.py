"""Simulations: times counted by hand, planned ends, rejections, and reproducibility."""

from __future__ import annotations

import pytest

from quire.base.records import StepPlan
from quire.obs.timing import Goals
from quire.sim.load import RequestDefaults
from quire.sim.run import simulate
from quire.sim.summary import summary_of
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, machine, request


def test_a_single_request_takes_its_steps_in_sequence() -> None:
    run = simulate([request(500.0, 33, 3)], DEFAULTS, machine(), config())
    [finished] = run.finished
    # 32 tokens of the prompt in 41 ms, the last in 10 ms, and two more tokens.
    assert finished.first_scheduled_ms == 500
    assert finished.first_token_ms == 551
    assert finished.last_token_ms == 571
    assert run.stats.steps_total == 4
    assert run.busy_ms == 71
    assert run.end_ms == 571


def test_engine_overhead_per_step_counts() -> None:
    run = simulate([request(0.0, 1, 3)], DEFAULTS, machine(loop_ms=2.0), config())
    assert run.finished[0].last_token_ms == 36


def test_idle_time_is_skipped() -> None:
    requests = [request(0.0, 1, 1), request(3_600_000.0, 1, 1)]
    run = simulate(requests, DEFAULTS, machine(), config())
    assert [one.first_token_ms for one in run.finished] == [10, 3_600_010]
    assert run.stats.steps_total == 2


def test_requests_end_as_planned_without_the_scheduler_knowing() -> None:
    requests = drawn_requests(60, per_s=20, seed=1)
    tokens = {"sum": 0}

    def count(plan: StepPlan) -> None:
        tokens["sum"] += int(plan.samples.sum())

    run = simulate(requests, DEFAULTS, machine(), config(), on_plan=count)
    assert len(run.finished) == 60
    assert tokens["sum"] == sum(one.output_tokens for one in requests)
    assert all(
        one.request.arrival_ms <= one.first_scheduled_ms < one.first_token_ms <= one.last_token_ms
        for one in run.finished
    )


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_the_same_jobs_give_the_same_times(plans_in_flight: int) -> None:
    requests = drawn_requests(60, per_s=30, seed=2, shared=True)
    settings = config(plans_in_flight=plans_in_flight, kv_cache_memory="300KiB")
    runs = [simulate(requests, DEFAULTS, machine(), settings) for _ in range(2)]
    assert runs[0].finished == runs[1].finished
    assert runs[0].stats == runs[1].stats
    assert runs[0].stats.preemptions_total > 0
    assert len(runs[0].finished) == 60


def test_two_plans_in_flight_leave_no_gap_between_steps() -> None:
    requests = [request(0.0, 1, 9)]
    run = simulate(requests, DEFAULTS, machine(), config(plans_in_flight=2))
    assert run.finished[0].last_token_ms == 90
    # The step in flight when the last token arrived is computed in vain, and waited for.
    assert run.end_ms == run.busy_ms == 100


def test_a_full_queue_rejects_and_rejections_are_counted() -> None:
    requests = [request(0.0, 20, 30)] * 20
    run = simulate(requests, DEFAULTS, machine(), config(max_queued_requests=3))
    assert len(run.finished) == 7
    assert run.refusals == {"OverloadedError": 13}
    found = summary_of(run, requests, Goals())
    assert found["num_errors"] == 13
    assert found["good_share"] == pytest.approx(7 / 20)


def test_shared_blocks_hit_the_prefix_cache() -> None:
    defaults = RequestDefaults(max_tokens=8, max_model_len=1024)
    requests = [request(10_000.0 * n, 600, 4, block_ids=(n % 2,)) for n in range(6)]
    settings = config(kv_cache_memory="4MiB")
    run = simulate(requests, defaults, machine(), settings)
    assert [one.cached_tokens for one in run.finished] == [0, 0, 512, 512, 512, 512]
    off = simulate(requests, defaults, machine(), config(enable_prefix_caching=False))
    assert [one.cached_tokens for one in off.finished] == [0] * 6
    assert off.busy_ms > run.busy_ms


def test_a_summary_has_times_by_tenant() -> None:
    requests = [request(0.0, 1, 2, tenant="a"), request(1000.0, 33, 3, tenant="b")]
    run = simulate(requests, DEFAULTS, machine(), config())
    found = summary_of(run, requests, Goals(ttft_s=0.02, tpot_s=0.1))
    assert found["tenants"]["a"]["ttft_s"]["p99"] == pytest.approx(0.010)
    assert found["tenants"]["b"]["ttft_s"]["p99"] == pytest.approx(0.051)
    assert found["ttft_mean_s"] == pytest.approx(0.0305)
    assert found["latency_mean_s"] == pytest.approx((0.020 + 0.071) / 2)
    assert found["good_share"] == 0.5
    assert found["longest_wait_s"] == 0.0


def test_deadlines_and_queue_timeouts_end_requests_as_in_service() -> None:
    defaults = RequestDefaults(max_tokens=64, max_model_len=512, deadline_ms=100.0)
    run = simulate([request(0.0, 1, 30)], defaults, machine(), config())
    assert run.refusals == {"TimedOut": 1}
    assert run.end_ms == 100
    requests = [request(0.0, 1, 60)] * 4 + [request(0.0, 1, 5)] * 2
    run = simulate(requests, DEFAULTS, machine(), config(queue_timeout=0.2))
    assert run.refusals == {"QueueTimedOut": 2}
    assert len(run.finished) == 4
