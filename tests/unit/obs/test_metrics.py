"""Each metric moves when the thing it counts happens, and only then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.base.engine_stats import PREEMPTION_COSTS_MS, EngineStats
from quire.base.records import RequestTimes
from quire.base.scheduling_params import SchedulingParams
from quire.obs.engine_metrics import BusyShare
from quire.obs.metrics import Metrics
from tests.cases import each_case

TIMES = RequestTimes(
    arrival_ms=1_000.0, first_scheduled_ms=1_010.0, first_token_ms=1_200.0, last_token_ms=1_600.0
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Return all samples by name with labels, as a scraper reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def a_choice(metrics: Metrics) -> None:
    metrics.choice(finish_reason="stop", times=TIMES, prompt_tokens=7, output_tokens=5)


def promised(metrics: Metrics, finish_reason: str = "stop", **objectives: float) -> None:
    """Return objectives: 200 ms to the first token, 600 ms in all, 100 ms a token."""
    metrics.choice(
        finish_reason=finish_reason,
        times=TIMES,
        prompt_tokens=7,
        output_tokens=5,
        terms=SchedulingParams(**objectives),  # type: ignore[arg-type]
    )


def engine(**fields: Any) -> Callable[[Metrics], None]:
    return lambda metrics: metrics.see(EngineStats(**fields))


# Ten were preempted, nine are back.
PREEMPTED: dict[str, Any] = {
    "preemptions_total": 10,
    "preemptions_moved_total": 3,
    "preemptions_for_prompts_total": 4,
    "preemptions_for_turns_total": 2,
    "preemptions_for_ceilings_total": 1,
    "preemption_cost_counts": (2, *([0] * (len(PREEMPTION_COSTS_MS) - 1)), 7),
    "preemption_cost_ms_total": 600.0,
}
# Seven rows with drafts, three of them from predictions.
DRAFTED: dict[str, Any] = {
    "proposer": "eagle",
    "drafting_ms_total": 29.0,
    "draft_saved_ms_total": 70.0,
    "draft_added_ms_total": 11.0,
    "draft_rows_total": 7,
    "draft_tokens_total": (7, 5),
    "accepted_draft_tokens_total": (6, 4),
    "prediction_rows_total": 3,
    "prediction_tokens_total": (3,),
    "accepted_prediction_tokens_total": (1,),
}
FOUND: dict[str, Any] = {
    "prefix_hit_tokens_total": 54,
    "prefix_hit_host_tokens_total": 8,
    "prefix_hit_disk_tokens_total": 16,
}
MOVES: list[tuple[str, Callable[[Metrics], None], float]] = [
    ("quire_time_to_first_token_seconds_sum", a_choice, 0.2),
    ("quire_time_per_output_token_seconds_sum", a_choice, 0.1),
    ("quire_request_seconds_sum", a_choice, 0.6),
    ("quire_queue_seconds_sum", a_choice, 0.01),
    ("quire_requests_total{finish_reason=stop}", a_choice, 1),
    ("quire_prompt_tokens_total", a_choice, 7),
    ("quire_generated_tokens_total", a_choice, 5),
    ("quire_errors_total{kind=WorkerError}", lambda metrics: metrics.error("WorkerError"), 1),
    ("quire_timeouts_total", lambda metrics: metrics.timeout(), 1),
    ("quire_disconnects_total", lambda metrics: metrics.disconnect(), 1),
    ("quire_api_process_restarts_total", lambda metrics: metrics.restarts.inc(), 1),
    ("quire_slow_readers_total", lambda metrics: metrics.slow_reader(), 1),
    ("quire_log_lines_dropped_total", lambda metrics: metrics.dropped_lines(3), 3),
    ("quire_open_requests", lambda metrics: metrics.opened(), 1),
    (
        "quire_http_responses_total{route=/v1/models,status=200}",
        lambda metrics: metrics.answered(route="/v1/models", status=200),
        1,
    ),
    ("quire_engine_restarts_total", engine(restarts_total=2), 2),
    ("quire_batch_rows_sum", engine(steps_total=1, step_rows=3), 3),
    ("quire_batch_tokens_sum", engine(steps_total=1, step_tokens=40), 40),
    ("quire_running_requests", engine(running=4), 4),
    ("quire_waiting_requests", engine(waiting=5), 5),
    ("quire_waiting_tokens", engine(waiting_tokens=50), 50),
    ("quire_tenant_running_requests{tenant=b}", engine(tenant_running=(1, 2)), 2),
    ("quire_tenant_waiting_requests{tenant=a}", engine(tenant_waiting=(3, 0)), 3),
    ("quire_tenant_kv_blocks{tenant=b}", engine(tenant_blocks=(0, 9)), 9),
    ("quire_tenant_prompt_tokens_total{tenant=default}", a_choice, 7),
    ("quire_tenant_generated_tokens_total{tenant=default}", a_choice, 5),
    ("quire_goodput_requests_total", a_choice, 1),
    ("quire_goodput_tokens_total", a_choice, 5),
    (
        "quire_missed_objectives_total{objective=ttft_slo_ms}",
        lambda metrics: promised(metrics, ttft_slo_ms=199.0),
        1,
    ),
    (
        "quire_refused_requests_total{reason=overloaded}",
        lambda metrics: metrics.refused("overloaded"),
        1,
    ),
    ("quire_kv_blocks", engine(blocks_total=6), 6),
    ("quire_kv_blocks_used", engine(blocks_used=7), 7),
    ("quire_kv_blocks_cached", engine(blocks_cached=8), 8),
    ("quire_kv_blocks_free", engine(blocks_free=24), 24),
    ("quire_kv_blocks_reserved", engine(blocks_reserved=25), 25),
    ("quire_kv_blocks_allocated_total", engine(allocated_blocks_total=26), 26),
    ("quire_kv_block_allocation_seconds_total", engine(block_allocation_ms_total=27.0), 0.027),
    ("quire_device_busy_seconds_total", engine(device_busy_ms_total=28_000.0), 28),
    ("quire_stage_wait_seconds_total", engine(stage_wait_ms_total=2_900.0), 2.9),
    ("quire_device_busy_share", engine(device_busy_ms_total=1e9), 1.0),
    ("quire_steps_total", engine(steps_total=9), 9),
    ("quire_prefix_queried_tokens_total", engine(prefix_queried_tokens_total=10), 10),
    ("quire_prefix_hit_tokens_total", engine(prefix_hit_tokens_total=11), 11),
    ("quire_preemptions_total", engine(preemptions_total=12), 12),
    ("quire_held_requests", engine(held=21), 21),
    ("quire_holds_total", engine(held_total=22), 22),
    ("quire_layered_tokens_total", engine(layered_tokens_total=23), 23),
    ("quire_row_errors_total", engine(row_errors_total=13), 13),
    ("quire_drafting_seconds_total{proposer=eagle}", engine(**DRAFTED), 0.029),
    ("quire_draft_saved_seconds_total{proposer=eagle}", engine(**DRAFTED), 0.07),
    ("quire_draft_added_seconds_total{proposer=eagle}", engine(**DRAFTED), 0.011),
    ("quire_draft_rows_total{proposer=eagle}", engine(**DRAFTED), 4),
    ("quire_draft_rows_total{proposer=ngram}", engine(proposer="ngram"), 0),
    ("quire_draft_errors_total{part=proposer}", engine(draft_proposer_errors_total=2), 2),
    ("quire_draft_errors_total{part=control}", engine(draft_errors_total=1), 1),
    ("quire_draft_rows_total{proposer=prediction}", engine(**DRAFTED), 3),
    ("quire_draft_tokens_total{position=1,proposer=eagle}", engine(**DRAFTED), 4),
    ("quire_draft_tokens_total{position=2,proposer=eagle}", engine(**DRAFTED), 5),
    ("quire_draft_tokens_total{position=1,proposer=prediction}", engine(**DRAFTED), 3),
    ("quire_accepted_draft_tokens_total{position=1,proposer=eagle}", engine(**DRAFTED), 5),
    ("quire_accepted_draft_tokens_total{position=1,proposer=prediction}", engine(**DRAFTED), 1),
    ("quire_prefix_hit_tokens_by_tier_total{tier=pool}", engine(**FOUND), 30),
    ("quire_prefix_hit_tokens_by_tier_total{tier=host}", engine(**FOUND), 8),
    ("quire_prefix_hit_tokens_by_tier_total{tier=disk}", engine(**FOUND), 16),
    ("quire_pinned_blocks", engine(pinned_blocks=24), 24),
    ("quire_pinned_tokens_total", engine(pinned_tokens_total=25), 25),
    ("quire_ended_pins_total{reason=expired}", engine(expired_pins_total=26), 26),
    ("quire_ended_pins_total{reason=share}", engine(dropped_pins_total=27), 27),
    ("quire_ended_pins_total{reason=evicted}", engine(evicted_pins_total=28), 28),
    ("quire_watermark_blocks", engine(watermark_blocks=14), 14),
    ("quire_tier_blocks", engine(tier_blocks_total=15), 15),
    ("quire_tier_blocks_used", engine(tier_blocks_used=16), 16),
    ("quire_tier_saved_blocks_total", engine(tier_saved_blocks_total=17), 17),
    ("quire_tier_fetched_blocks_total", engine(tier_fetched_blocks_total=18), 18),
    ("quire_tier_unsaved_blocks_total", engine(tier_unsaved_blocks_total=19), 19),
    ("quire_tier_bad_blocks_total", engine(tier_bad_blocks_total=20), 20),
    ("quire_tier_failures_total", engine(tier_failures_total=1), 1),
    ("quire_preemptions_by_way_total{way=move}", engine(**PREEMPTED), 3),
    ("quire_preemptions_by_way_total{way=recompute}", engine(**PREEMPTED), 7),
    ("quire_preemptions_by_reason_total{reason=answer}", engine(**PREEMPTED), 3),
    ("quire_preemptions_by_reason_total{reason=prompt}", engine(**PREEMPTED), 4),
    ("quire_preemptions_by_reason_total{reason=turn}", engine(**PREEMPTED), 2),
    ("quire_preemptions_by_reason_total{reason=ceiling}", engine(**PREEMPTED), 1),
    ("quire_preemption_cost_seconds_sum", engine(**PREEMPTED), 0.6),
    ("quire_preemption_cost_seconds_count", engine(**PREEMPTED), 9),
    ("quire_preemption_cost_seconds_bucket{le=+Inf}", engine(**PREEMPTED), 9),
    ("quire_preemption_cost_seconds_bucket{le=0.001}", engine(**PREEMPTED), 2),
]


def test_drafts_of_an_engine_without_a_proposer_are_all_those_of_predictions() -> None:
    """Times too: they were left out, as counts were not."""
    metrics = Metrics()
    engine(**{**DRAFTED, "proposer": "", "draft_rows_total": 3})(metrics)
    found = {name: value for name, value in samples(metrics).items() if "draft" in name}
    errors = {name for name in found if name.startswith("quire_draft_errors")}
    ours = {name for name in found if name.startswith("quire_")} - errors
    assert ours
    assert all("proposer=prediction" in name for name in ours)
    assert found["quire_draft_saved_seconds_total{proposer=prediction}"] == pytest.approx(0.07)
    assert found["quire_draft_added_seconds_total{proposer=prediction}"] == pytest.approx(0.011)
    assert found["quire_drafting_seconds_total{proposer=prediction}"] == pytest.approx(0.029)


@each_case(("name", "happens", "value"), MOVES, ids=[name for name, _, _ in MOVES])
def test_each_metric_moves_when_its_event_happens(
    name: str, happens: Callable[[Metrics], None], value: float
) -> None:
    metrics = Metrics(("a", "b"))
    assert samples(metrics).get(name, 0) == 0
    happens(metrics)
    assert samples(metrics)[name] == pytest.approx(value)


def family_of(sample: str) -> str:
    """Return a sample's metric: its name without labels and histogram suffixes."""
    name = sample.split("{")[0]
    return name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")


def test_every_metric_has_a_case_that_moves_it() -> None:
    metrics, shown = Metrics(("a", "b")), set()
    for _, happens, _ in MOVES:
        happens(metrics)
        shown |= {name.split("{")[0] for name in samples(metrics)}
    families = {family_of(name) for name in shown}
    moved = {family_of(name) for name, _, _ in MOVES}
    assert families == moved


def test_events_that_never_happened_are_not_observed() -> None:
    metrics = Metrics()
    never = RequestTimes(
        arrival_ms=0.0, first_scheduled_ms=math.nan, first_token_ms=math.nan, last_token_ms=math.nan
    )
    metrics.choice(finish_reason="abort", times=never, prompt_tokens=3, output_tokens=0)
    found = samples(metrics)
    assert found["quire_queue_seconds_count"] == 0
    assert found["quire_time_to_first_token_seconds_count"] == 0
    assert found["quire_request_seconds_count"] == 0
    assert found["quire_requests_total{finish_reason=abort}"] == 1


def test_a_single_token_has_no_time_between_tokens() -> None:
    metrics = Metrics()
    metrics.choice(finish_reason="length", times=TIMES, prompt_tokens=1, output_tokens=1)
    assert samples(metrics)["quire_time_per_output_token_seconds_count"] == 0


def test_the_same_step_is_observed_once() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.see(EngineStats(steps_total=5, step_rows=2, step_tokens=2))
    assert samples(metrics)["quire_batch_rows_count"] == 1


def test_an_answered_request_is_no_longer_open() -> None:
    metrics = Metrics()
    metrics.opened()
    metrics.answered(route="/", status=200)
    assert samples(metrics)["quire_open_requests"] == 0


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.timeout()
    assert samples(second)["quire_timeouts_total"] == 0


@pytest.mark.parametrize(
    ("objectives", "missed"),
    [
        ({}, []),
        ({"deadline_ms": 600.0, "ttft_slo_ms": 200.0, "tpot_slo_ms": 100.0}, []),
        ({"deadline_ms": 599.0, "ttft_slo_ms": 200.0, "tpot_slo_ms": 99.0}, ["deadline", "tpot"]),
        ({"ttft_slo_ms": 199.0}, ["ttft"]),
    ],
)
def test_goodput_counts_requests_that_met_every_named_objective(
    objectives: dict[str, float], missed: list[str]
) -> None:
    metrics = Metrics()
    promised(metrics, **objectives)
    found = samples(metrics)
    assert found["quire_goodput_requests_total"] == (not missed)
    assert found["quire_goodput_tokens_total"] == (0 if missed else 5)
    shown = [name for name in ("deadline", "ttft", "tpot") if any(f"={name}_" in f for f in found)]
    assert shown == missed


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_incomplete_request_is_no_goodput_and_missed_all_objectives(reason: str) -> None:
    metrics = Metrics()
    promised(metrics, reason)
    assert samples(metrics)["quire_goodput_requests_total"] == 0
    promised(metrics, reason, deadline_ms=1e6)
    assert samples(metrics)["quire_missed_objectives_total{objective=deadline_ms}"] == 1


def test_a_missing_first_token_meets_no_objective() -> None:
    metrics = Metrics()
    scored = RequestTimes(
        arrival_ms=0.0, first_scheduled_ms=1.0, first_token_ms=math.nan, last_token_ms=5.0
    )
    metrics.choice(
        finish_reason="length",
        times=scored,
        prompt_tokens=1,
        output_tokens=0,
        terms=SchedulingParams(ttft_slo_ms=100.0, deadline_ms=100.0),
    )
    assert samples(metrics)["quire_missed_objectives_total{objective=ttft_slo_ms}"] == 1


def test_the_busy_share_is_of_the_last_minute() -> None:
    now_ms = 0.0
    share = BusyShare(lambda: now_ms)
    found = []
    busy_ms = 0.0
    for second in range(1, 201):
        now_ms += 1000.0
        busy_ms += 500.0 if second <= 100 else 0.0
        found.append(share.sample(busy_ms))
    assert found[0] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.5)
    assert found[129] == pytest.approx(0.25, abs=0.01)
    assert found[199] == 0.0
