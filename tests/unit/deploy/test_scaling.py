"""How many replicas a load needs, and what a replica reports of its load."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.base.engine_snapshot import StepPrices
from quire.base.engine_stats import EngineStats
from quire.base.errors import WorkerError
from quire.deploy.ray_serve.load_report import LoadReport, predicted_ttft_ms
from quire.deploy.ray_serve.scaling import (
    RUNNING,
    SLOTS,
    TTFT_MS,
    WAITING_TOKENS,
    Reports,
    ScalingPolicy,
    ScalingTarget,
    replicas_needed,
)
from tests.cases import each_case
from tests.unit.api.fake_engine import SNAPSHOT, FakeEngine

TARGET = ScalingTarget(busy_share=0.5, waiting_tokens=1000)


def reports(*replicas: tuple[float, float, float], slots: float = 8.0) -> Reports:
    """Return reports of (running, waiting tokens, predicted TTFT in ms) for each replica."""
    names = range(len(replicas))
    return {
        SLOTS: dict.fromkeys(names, slots),
        **{
            name: {at: replicas[at][column] for at in names}
            for column, name in enumerate((RUNNING, WAITING_TOKENS, TTFT_MS))
        },
    }


@each_case(
    ("load", "count"),
    [
        (reports((0, 0, 0)), 0),
        (reports((1, 0, 0)), 1),
        (reports((0, 1, 0)), 1),
        (reports((4, 0, 0)), 1),
        (reports((5, 0, 0)), 2),
        (reports((4, 1000, 0)), 2),
        (reports((4, 1001, 0)), 3),
        (reports((4, 0, 0), (0, 0, 0)), 1),
        (reports((4, 0, 0), (4, 0, 0)), 2),
    ],
)
def test_replicas_follow_running_requests_and_waiting_tokens(load: Reports, count: int) -> None:
    assert math.ceil(replicas_needed(load, len(load[SLOTS]), TARGET)) == count


def test_replicas_that_report_nothing_are_replaced_where_there_is_load() -> None:
    busy = reports((4, 0, 0), (4, 0, 0))
    assert replicas_needed(busy, 3, TARGET) == 2 + 1
    assert replicas_needed({}, 1, TARGET) == 1
    assert replicas_needed({}, 1, TARGET, num_calls=0.5) == 2
    assert replicas_needed(reports((0, 0, 0)), 1, TARGET, num_calls=0.5) == 1


@pytest.mark.parametrize(
    ("running", "wanted", "calls", "load", "count"),
    [
        (0, 0, 0.0, {}, 0),
        (0, 1, 0.0, {}, 1),  # one is starting
        (0, 1, 1.0, {}, 1),
        (1, 1, 1.0, {}, 2),  # the only one is stopped
        (1, 1, 0.0, {}, 1),
        (2, 2, 0.0, reports((0, 0, 0), (0, 0, 0)), 0),
        (1, 1, 0.0, reports((8, 0, 0)), 2),
    ],
)
def test_the_policy_keeps_what_is_starting(
    running: int, wanted: int, calls: float, load: Reports, count: int
) -> None:
    policy = ScalingPolicy(busy_share=0.5, waiting_tokens=1000, ttft_ms=0.0)
    context = SimpleNamespace(
        aggregated_metrics=load,
        current_num_replicas=running,
        target_num_replicas=wanted,
        total_num_requests=calls,
    )
    needed, state = policy(context)
    assert (math.ceil(needed), state) == (count, {})


def test_replicas_follow_the_predicted_time_to_first_token() -> None:
    target = replace(TARGET, waiting_tokens=10**9, ttft_ms=200.0)
    load = reports((1, 50, 900), (1, 50, 300))
    assert replicas_needed(load, 2, target) == 2 * 600 / 200
    assert replicas_needed(load, 2, replace(target, ttft_ms=0.0)) < 1
    on_time = reports((1, 50, 100), (1, 50, 300))
    assert replicas_needed(on_time, 2, target) < 1
    assert replicas_needed(reports((1, 0, 900)), 1, target) < 1  # an old prediction: none wait


def test_the_prediction_is_of_the_waiting_tokens_at_the_learned_prices() -> None:
    prices = StepPrices(
        steps_timed=20, fixed_ms=3.0, token_ms=0.5, score_ms=0.0, position_ms=0.0, read_ms=0.0
    )
    snapshot = replace(SNAPSHOT, step_prices=prices, limits={"max_num_batched_tokens": 100.0})
    stats = EngineStats(waiting_tokens=250)
    assert predicted_ttft_ms(stats, snapshot) == 3 * 3.0 + 250 * 0.5
    untimed = replace(snapshot, step_prices=replace(prices, steps_timed=0))
    assert predicted_ttft_ms(stats, untimed) == 0.0


def test_a_report_asks_the_engine_rarely_and_survives_its_death() -> None:
    async def story() -> None:
        engine: Any = FakeEngine()
        asked: list[float] = []
        now_s = [100.0]

        async def engine_snapshot() -> Any:
            asked.append(now_s[0])
            if now_s[0] > 150:
                raise WorkerError("the engine is gone")
            return SNAPSHOT

        engine.engine_snapshot = engine_snapshot
        load = LoadReport(engine, lambda: now_s[0])
        assert (await load.read())[TTFT_MS] == 0.0
        assert not asked  # nothing waits, so nothing is predicted
        engine.stats = EngineStats(running=2, waiting_tokens=64)
        first = await load.read()
        assert first[RUNNING] == 2.0
        assert first[WAITING_TOKENS] == 64.0
        assert first[SLOTS] == 8.0
        assert first[TTFT_MS] == predicted_ttft_ms(engine.stats, SNAPSHOT) > 0
        await load.read()
        assert asked == [100.0]
        now_s[0] = 200.0
        assert (await load.read())[TTFT_MS] == 0.0

    asyncio.run(story())
