"""Situations made of the server's own metrics, with the traffic that a test wants.

`situation()` alone is a healthy server under moderate load; each argument changes one thing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.engine_stats import EngineStats
from quire.base.records import RequestTimes
from quire.doctor.readings import Reading, Window, read_metrics
from quire.doctor.situation import DEFAULT_GOALS, EngineView, Situation
from quire.obs.metrics import Metrics
from quire.obs.timing import Goals
from quire.scheduler.cost.step_cost import LinearCost

PRICES = LinearCost(fixed_ms=8.0, token_ms=0.1, position_ms=0.0, score_ms=0.1, read_ms=0.0)
ENGINE = EngineView(
    slots=8,
    step_tokens=64,
    max_model_len=512,
    plans_in_flight=1,
    tpot_target_ms=0.0,
    long_prompt_tokens=256,
    max_long_prompts=0,
    max_short_prompts=0,
    part_layers=0,
    num_blocks=100,
    block_size=16,
    block_bytes=2**20,
    oldest_wait_ms=0.0,
    prices=PRICES,
)
Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What happens between two readings; pairs are gauges at the first and the last.

    ttft_ms, queue_ms, tpot_ms: of every choice, but for those of `slow`, which are `slow_ms`.
    """

    choices: int = 100
    prompt_tokens: int = 50
    output_tokens: int = 21
    ttft_ms: float = 60.0
    queue_ms: float = 6.0
    tpot_ms: float = 12.0
    slow_choices: int = 0
    slow_ttft_ms: float = 60.0
    slow_tpot_ms: float = 12.0
    seconds: float = 10.0
    busy_s: float = 7.0
    steps: int = 50
    rows: int = 4
    tokens: int = 6
    running: Pair = (4, 4)
    waiting: Pair = (0, 0)
    used: Pair = (40, 40)
    reserved: Pair = (0, 0)
    cached: Pair = (0, 0)
    preemptions: int = 0
    queried: int = 0
    hits: int = 0
    tier_failures: int = 0
    errors: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    disconnects: int = 0
    restarts: int = 0


def window(traffic: Traffic) -> Window:
    """Return the window of some traffic, after an hour of other traffic."""
    metrics = Metrics()
    before = EngineStats(
        blocks_total=100,
        steps_total=900,
        device_busy_ms_total=5e5,
        preemptions_total=70,
        prefix_queried_tokens_total=10_000,
        prefix_hit_tokens_total=9_000,
        running=int(traffic.running[0]),
        waiting=int(traffic.waiting[0]),
        blocks_used=int(traffic.used[0]),
        blocks_reserved=int(traffic.reserved[0]),
        blocks_cached=int(traffic.cached[0]),
        step_rows=1,
        step_tokens=1,
    )
    _end(metrics, 20, ttft_ms=9e5, queue_ms=8e5, tpot_ms=2e3, prompt_tokens=9, output_tokens=9)
    metrics.error("WorkerError")
    metrics.see(before)
    first = _read(metrics, 100.0)
    _end(
        metrics,
        traffic.choices - traffic.slow_choices,
        ttft_ms=traffic.ttft_ms,
        queue_ms=traffic.queue_ms,
        tpot_ms=traffic.tpot_ms,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
    )
    _end(
        metrics,
        traffic.slow_choices,
        ttft_ms=traffic.slow_ttft_ms,
        queue_ms=traffic.queue_ms,
        tpot_ms=traffic.slow_tpot_ms,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
    )
    for kind in traffic.errors:
        metrics.error(kind)
    for reason in traffic.refusals:
        metrics.refused(reason)
    for _ in range(traffic.disconnects):
        metrics.disconnect()
    metrics.restarts.inc(traffic.restarts)
    after = replace(
        before,
        device_busy_ms_total=5e5 + 1e3 * traffic.busy_s,
        preemptions_total=70 + traffic.preemptions,
        prefix_queried_tokens_total=10_000 + traffic.queried,
        prefix_hit_tokens_total=9_000 + traffic.hits,
        running=int(traffic.running[1]),
        waiting=int(traffic.waiting[1]),
        blocks_used=int(traffic.used[1]),
        blocks_reserved=int(traffic.reserved[1]),
        blocks_cached=int(traffic.cached[1]),
        tier_failures_total=traffic.tier_failures,
        step_rows=traffic.rows,
        step_tokens=traffic.tokens,
    )
    for step in range(traffic.steps):
        metrics.see(replace(after, steps_total=901 + step))
    metrics.see(replace(after, steps_total=900 + traffic.steps))
    return Window(first, _read(metrics, 100.0 + traffic.seconds))


def situation(
    *,
    engine: EngineView | None = ENGINE,
    goals: Goals = DEFAULT_GOALS,
    health: dict[str, object] | None = None,
    model: dict[str, object] | None = None,
    **traffic: object,
) -> Situation:
    """Return a situation. traffic: fields of Traffic."""
    return Situation(
        window=window(Traffic(**traffic)),  # type: ignore[arg-type]
        goals=goals,
        engine=engine,
        health={"ok": True, "state": "ready", "reason": ""} if health is None else health,
        model={"dtype": "bf16", "quantization": "none", "kv_cache_dtype": "bf16", **(model or {})},
    )


def _end(
    metrics: Metrics,
    count: int,
    *,
    ttft_ms: float,
    queue_ms: float,
    tpot_ms: float,
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    for _ in range(count):
        metrics.choice(
            finish_reason="stop",
            times=RequestTimes(
                arrival_ms=0.0,
                first_scheduled_ms=queue_ms,
                first_token_ms=ttft_ms,
                last_token_ms=ttft_ms + tpot_ms * (output_tokens - 1),
            ),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )


def _read(metrics: Metrics, at_s: float) -> Reading:
    return read_metrics(metrics.text().decode(), at_s=at_s, where="http://test/metrics")
