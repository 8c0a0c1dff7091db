"""The speed estimate learns the prices of steps from their times, and keeps them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from quire.base.records import PartLayers, StepPlan
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.cost.step_cost import LinearCost

TRUE = LinearCost(fixed_ms=12.0, token_ms=0.8, position_ms=0.001, score_ms=0.5, read_ms=0.004)


def plan_of(counts: list[int], starts: list[int]) -> StepPlan:
    slots = np.arange(len(counts), dtype=np.int32)
    return StepPlan(
        step=1,
        slots=slots,
        counts=np.array(counts, np.int32),
        starts=np.array(starts, np.int32),
    )


def true_ms(plan: StepPlan, num_heads: int, cost: LinearCost = TRUE) -> float:
    rows_ms = float(cost.rows_ms(plan.starts, plan.counts).sum())
    return cost.fixed_ms + rows_ms + num_heads * cost.score_ms


def drawn_step(random: Random) -> tuple[StepPlan, int]:
    """Draw decoding rows, sometimes with a prompt chunk."""
    num_rows = random.randrange(1, 17)
    counts, starts = [1] * num_rows, [random.randrange(2000) for _ in range(num_rows)]
    if random.random() < 0.4:
        counts.append(random.randrange(2, 128))
        starts.append(random.randrange(3000))
    return plan_of(counts, starts), num_rows


def taught(estimate: SpeedEstimate, *, steps: int, noise: float = 0.0) -> SpeedEstimate:
    random = Random(1)
    for _ in range(steps):
        plan, num_heads = drawn_step(random)
        factor = 1.0 + random.uniform(-noise, noise)
        estimate.note(plan, num_heads, true_ms(plan, num_heads) * factor)
    return estimate


def test_step_prices_are_learned_from_times() -> None:
    found = taught(SpeedEstimate(), steps=300).now
    assert found.fixed_ms == pytest.approx(TRUE.fixed_ms, rel=0.02)
    assert found.token_ms == pytest.approx(TRUE.token_ms, rel=0.02)
    assert found.position_ms == pytest.approx(TRUE.position_ms, rel=0.05)
    assert found.score_ms == pytest.approx(TRUE.score_ms, rel=0.1)
    assert found.read_ms == pytest.approx(TRUE.read_ms, rel=0.05)


def test_predictions_from_noisy_times_are_right_on_average() -> None:
    estimate = taught(SpeedEstimate(), steps=300, noise=0.3)
    assert estimate.step_ms(8, 8 * 500) == pytest.approx(12 + 8 * 1.3 + 20, rel=0.1)
    assert estimate.span_ms(0, 1000) == pytest.approx(800 + 500, rel=0.15)


def test_a_tail_of_slow_steps_counts_in_full() -> None:
    """On a busy machine: the sum of many steps is predicted, so the mean has to be right."""
    estimate, plan = SpeedEstimate(), plan_of([1] * 8, [500] * 8)
    times_ms = [10.0, 10.0, 10.0, 10.0, 60.0]
    for number in range(1_000):
        estimate.note(plan, 8, times_ms[number % 5])
    assert estimate.step_ms(8, 8 * 501) == pytest.approx(20.0, rel=0.1)


def test_one_stall_does_not_set_the_prices() -> None:
    estimate, plan = SpeedEstimate(), plan_of([1] * 8, [500] * 8)
    for number in range(300):
        estimate.note(plan, 8, 1e6 if number == 250 else 10.0)
    assert estimate.step_ms(8, 8 * 501) < 15.0


def test_a_step_predicted_to_take_no_time_does_not_dominate() -> None:
    estimate, plan = SpeedEstimate(), plan_of([1], [0])
    estimate.note(plan, 1, 1.0)
    assert estimate.now.fixed_ms > 0
    estimate._prices[:] = 0.0
    for _ in range(100):
        estimate.note(plan, 1, 1.0)
        assert estimate.now.fixed_ms > 0
    assert estimate.step_ms(1, 1) == pytest.approx(1.0)


def test_one_step_scales_a_prior_with_the_right_proportions() -> None:
    slow = LinearCost(
        fixed_ms=1200.0, token_ms=80.0, position_ms=0.1, score_ms=50.0, read_ms=0.4
    )  # a hundred times slower than the observed steps
    estimate = SpeedEstimate(slow)
    plan = plan_of([1, 1, 1], [10, 20, 30])
    estimate.note(plan, 3, true_ms(plan, 3))
    assert estimate.span_ms(0, 1000) == pytest.approx(800 + 500, rel=0.02)


def test_a_long_run_of_decode_steps_does_not_lose_the_price_of_prompts() -> None:
    estimate = taught(SpeedEstimate(), steps=300)
    plan = plan_of([1] * 8, [500] * 8)
    for _ in range(5_000):
        estimate.note(plan, 8, true_ms(plan, 8))
    assert estimate.span_ms(0, 1000) == pytest.approx(800 + 500, rel=0.05)


def test_a_machine_that_slows_down_is_followed() -> None:
    estimate = taught(SpeedEstimate(), steps=300)
    random = Random(2)
    for _ in range(1_000):
        plan, num_heads = drawn_step(random)
        estimate.note(plan, num_heads, 2 * true_ms(plan, num_heads))
    assert estimate.span_ms(0, 1000) == pytest.approx(2 * (800 + 500), rel=0.05)


def test_prices_are_never_negative() -> None:
    random = Random(3)
    estimate = SpeedEstimate()
    for _ in range(500):
        plan, num_heads = drawn_step(random)
        estimate.note(plan, num_heads, 10.0 ** random.uniform(-2, 3) / (1 + plan.num_tokens))
        now = estimate.now
        assert min(now.fixed_ms, now.token_ms, now.position_ms, now.score_ms) >= 0
        assert estimate.step_ms(1, 1) > 0


def test_impossible_times_are_ignored() -> None:
    estimate = SpeedEstimate()
    before = estimate.now
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        estimate.note(plan_of([1], [0]), 1, ms)
    assert estimate.now is before
    assert estimate.num_steps == 0


def test_steps_are_fitted_on_demand_and_not_one_by_one() -> None:
    estimate = SpeedEstimate()
    fits = []
    fit = estimate._fit
    estimate._fit = lambda: fits.append(1) or fit()  # type: ignore
    plan = plan_of([1, 1], [5, 6])
    for _ in range(640):
        estimate.note(plan, 2, 3.0)
    assert len(fits) == 10
    estimate.now, estimate.now  # noqa: B018
    assert len(fits) == 10


def test_layers_of_a_chunk_are_a_share_of_a_step() -> None:
    estimate, random = SpeedEstimate(), Random(4)
    for _ in range(300):
        plan, num_heads = drawn_step(random)
        ms = true_ms(plan, num_heads)
        if random.random() < 0.5:
            first, count, start = random.randrange(20), random.randrange(32, 512), 3000
            layers = PartLayers(
                slot=40,
                start=start,
                count=count,
                store_from=start,
                first_layer=first,
                end_layer=first + random.randrange(1, 8),
                num_layers=28,
            )
            plan = replace(plan, layers=layers)
            ms += layers.share * (TRUE.fixed_ms + TRUE.row_ms(start, count))
        estimate.note(plan, num_heads, ms)
    found = estimate.now
    assert found.fixed_ms == pytest.approx(TRUE.fixed_ms, rel=0.05)
    assert found.token_ms == pytest.approx(TRUE.token_ms, rel=0.05)
    assert found.position_ms == pytest.approx(TRUE.position_ms, rel=0.05)
