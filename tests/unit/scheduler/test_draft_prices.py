"""Prices of drafts: what steps with them take longer than plain ones, by computed positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from quire.scheduler.speculation.draft_prices import (
    NOTES_PER_MAKE,
    UNTRIED_EVERY,
    DraftedStep,
    DraftPrices,
)
from quire.scheduler.speculation.step_curve import Pace, Point, StepCurve, bucket_of, never_falling

# Positions and milliseconds of steps of a model of 0.6 billion parameters on two cores.
MEASURED = (
    (1, 25.3),
    (2, 26.0),
    (4, 28.5),
    (8, 34.0),
    (9, 36.0),
    (16, 54.5),
    (32, 98.0),
    (64, 190),
)
SLOPE_MS = 2.5  # of a position, as a line through prompts has it


def true_ms(positions: float) -> float:
    return float(np.interp(positions, *zip(*MEASURED, strict=True)))


def learn(
    prices: DraftPrices,
    num_rows: int,
    num_drafts: int,
    ms: float,
    times: int = 1,
    *,
    slope_ms: float = SLOPE_MS,
) -> None:
    """Note steps with a draft of each row or more, as they were predicted before."""
    for _ in range(times):
        plain_ms = prices.plain_ms(num_rows, slope_ms)
        added_ms = prices.added_ms(num_rows, num_drafts, plain_ms, slope_ms)
        rows = min(num_rows, num_drafts)
        step = DraftedStep(
            rows, num_rows + num_drafts, plain_ms, float(added_ms[-1]) + rows * prices.row_ms
        )
        prices.note(step, ms)


def added(
    prices: DraftPrices, num_rows: int, num_drafts: int, *, slope_ms: float = SLOPE_MS
) -> float:
    """Return what drafts are predicted to add, rows with drafts included."""
    plain_ms = prices.plain_ms(num_rows, slope_ms)
    added_ms = prices.added_ms(num_rows, num_drafts, plain_ms, slope_ms)
    return float(added_ms[-1]) + min(num_rows, num_drafts) * prices.row_ms


def test_at_first_drafts_cost_what_the_cost_model_predicts() -> None:
    prices = DraftPrices()
    assert prices.added_ms(4, 3, 0.0, 2.5).tolist() == [0.0, 2.5, 5.0, 7.5]
    assert not prices.known_plain_ms(4)
    assert prices.plain_ms(4, 2.5) == 0.0


def test_what_one_batch_learned_is_no_line_through_the_next() -> None:
    """Steps of nine positions are cheap for one request; of 36 for four they cost three times."""
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(1, true_ms(1))
    for _ in range(10):
        for num_drafts in (1, 3, 7, 8):
            learn(prices, 1, num_drafts, true_ms(1 + num_drafts))
    assert added(prices, 1, 8) == pytest.approx(true_ms(9) - true_ms(1), rel=0.1)
    for _ in range(4):
        prices.note_plain(4, true_ms(4))
    assert added(prices, 4, 4) == pytest.approx(true_ms(8) - true_ms(4), rel=0.15)
    assert added(prices, 4, 32) >= 0.8 * (true_ms(36) - true_ms(4))  # never tried


def test_plain_steps_of_many_rows_say_what_drafts_of_few_cost() -> None:
    prices = DraftPrices()
    for num_rows in (4, 8, 16, 32):
        for _ in range(4):
            prices.note_plain(num_rows, true_ms(num_rows))
    for num_drafts in (4, 12, 28):
        expected_ms = true_ms(4 + num_drafts) - true_ms(4)
        assert added(prices, 4, num_drafts) == pytest.approx(expected_ms, rel=0.15)


def test_the_time_of_the_host_is_learned_where_both_kinds_of_steps_are_known() -> None:
    prices = DraftPrices()
    for num_rows in (1, 2, 4, 8):
        for _ in range(20):
            prices.note_plain(num_rows, 0.4 + 0.02 * num_rows)
    for _ in range(20):
        learn(prices, 1, 3, 0.4 + 0.08 + 0.2, slope_ms=0.02)
    assert prices.once_ms == pytest.approx(0.2, rel=0.2)
    assert added(prices, 2, 2, slope_ms=0.02) == pytest.approx(0.24, rel=0.25)
    assert 0.0 < prices.row_ms < prices.once_ms / 8


def test_a_slow_step_without_drafts_does_not_make_drafts_look_cheap() -> None:
    prices = DraftPrices()
    for _ in range(3):
        prices.note_plain(4, true_ms(4))
    for _ in range(20):
        learn(prices, 4, 1, true_ms(5))
        learn(prices, 4, 4, true_ms(8))
    before_ms = added(prices, 4, 4)
    prices.note_plain(4, 3.0 * true_ms(4))
    assert added(prices, 4, 4) >= 0.5 * before_ms


def test_prices_are_not_negative_never_fall_and_a_stall_counts_little() -> None:
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(1, 1.0)
    learn(prices, 1, 2, 0.1, 20)  # shorter than without drafts
    table = prices.added_ms(1, 8, prices.plain_ms(1, 0.1), 0.1)
    assert table[0] == 0.0
    assert all(after >= before for before, after in pairwise(table.tolist()))
    learn(prices, 1, 2, 1.2, 100)
    before_ms = added(prices, 1, 2)
    learn(prices, 1, 2, 5000.0)
    assert added(prices, 1, 2) < before_ms + 0.2


def test_times_of_nothing_teach_nothing() -> None:
    prices = DraftPrices()
    prices.note(DraftedStep(1, 2, 1.0, 0.2), 0.0)
    prices.note_plain(1, 0.0)
    assert prices.added_ms(1, 1, 0.0, 0.2).tolist() == [0.0, 0.2]


def test_steps_with_prompts_cost_what_they_took_longer_than_predicted() -> None:
    prices = DraftPrices()
    for _ in range(40):
        added_ms = float(prices.added_ms(20, 4, 0.0, 0.1)[-1])
        prices.note(DraftedStep(4, 24, 1.5, added_ms, 0.5), 3.0)
    assert prices.added_ms(20, 4, 0.0, 0.1)[-1] == pytest.approx(1.0, rel=0.1)
    for _ in range(500):
        prices.fade()
    assert prices.added_ms(20, 4, 0.0, 0.1)[-1] < 0.5


def test_the_time_of_the_host_is_known_from_steps_that_asked_in_vain() -> None:
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(4, 1.0)
    before_ms = added(prices, 4, 1, slope_ms=0.1)
    for _ in range(16):
        prices.note_asked(4, 1.5)
        prices.note_plain(4, 1.0)
    assert 0.3 <= added(prices, 4, 1, slope_ms=0.1) - before_ms <= 0.7


def test_a_high_price_fades_while_no_drafts_are_made() -> None:
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(1, 1.0)
    learn(prices, 1, 1, 4.0, 30)
    assert added(prices, 1, 1) > 1.5
    for _ in range(64):
        prices.fade()
    assert added(prices, 1, 1) > 1.5  # not at once
    for _ in range(3000):
        prices.fade()
    prices.note_plain(1, 1.0)
    assert prices.added_ms(1, 1, 1.0, 0.1)[-1] < 0.2


def test_all_of_a_curve_follows_a_machine_that_becomes_slower() -> None:
    curve = StepCurve(Pace())
    for _ in range(10):
        for positions, ms in MEASURED:
            curve.note(positions, ms, ms)
    for _ in range(40):
        curve.note(8, 1.4 * true_ms(8), true_ms(8))
    found = {point.positions: point.ms for point in curve.points()}
    assert found[8.0] == pytest.approx(1.4 * true_ms(8), rel=0.05)
    assert 1.1 * true_ms(32) < found[32.0] <= 1.45 * true_ms(32)


def known_steps(ms: float) -> tuple[Pace, StepCurve]:
    """Return a curve that knows well that steps of one position take `ms`, and its pace."""
    pace = Pace()
    curve = StepCurve(pace)
    for _ in range(32):
        curve.note(1, ms, ms)
    return pace, curve


@pytest.mark.parametrize("times", [(20.0, 1.5, 9.0, 20.0), (1.5, 20.0, 20.0, 20.0)])
def test_steps_that_are_held_up_in_turn_are_as_slow_as_the_least_of_them(
    times: tuple[float, ...],
) -> None:
    _, curve = known_steps(0.2)
    for one in times:
        curve.note(1, one * 0.2, 0.2)
    assert curve.ms(1) <= 1.5 * 1.25**3 * 0.2


def test_a_pace_is_no_other_one_where_steps_are_too_slow_and_too_fast_by_turns() -> None:
    pace, curve = known_steps(0.2)
    for number in range(32):
        curve.note(1, 0.2 * (4.0 if number % 2 else 0.25), 0.2)
        assert 0.7 <= pace.times <= 1.4


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_a_pace_is_followed_after_few_steps(times: float) -> None:
    _, curve = known_steps(1.0)
    for number in range(16):
        curve.note(1, times * (1.0 + 0.1 * (number % 3 - 1)), 1.0)
    assert curve.ms(1) == pytest.approx(times, rel=0.2)


def test_the_first_steps_of_a_slower_machine_are_not_scaled_twice() -> None:
    prices = DraftPrices()
    for _ in range(2):
        prices.note_plain(1, 1.0)
    prices.note_plain(1, 20.0)
    learn(prices, 1, 3, 22.0, slope_ms=0.1)
    for _ in range(4):
        prices.note_plain(1, 20.0)
    assert prices.plain_ms(1, 0.1) == pytest.approx(20.0, rel=0.1)
    learn(prices, 1, 3, 22.0, 4, slope_ms=0.1)
    assert added(prices, 1, 3, slope_ms=0.1) == pytest.approx(2.0, abs=1.0)


def test_more_drafts_than_were_timed_cost_less_once_in_a_while() -> None:
    """Also where steps have a few more positions than the mean of their bucket."""
    prices, slope_ms = DraftPrices(), 6.0
    assert bucket_of(13) == bucket_of(14)
    for num_drafts, times in ((2, 5), (4, 5), (9, 1), (10, 5)):
        learn(prices, 4, num_drafts, true_ms(4 + num_drafts), times, slope_ms=slope_ms)
    usual_ms = added(prices, 4, 14, slope_ms=slope_ms)
    learn(prices, 4, 10, true_ms(14), UNTRIED_EVERY + NOTES_PER_MAKE, slope_ms=slope_ms)
    assert added(prices, 4, 14, slope_ms=slope_ms) < 0.8 * usual_ms
    learn(prices, 4, 14, true_ms(18), slope_ms=slope_ms)
    further_ms = added(prices, 4, 18, slope_ms=slope_ms) - added(prices, 4, 14, slope_ms=slope_ms)
    assert further_ms > 0.8 * 4 * slope_ms


def test_fewer_drafts_than_were_timed_cost_what_the_cost_model_predicts() -> None:
    """Also while no step without drafts was timed: not nothing."""
    prices = DraftPrices()
    learn(prices, 16, 10, true_ms(26), times=8)
    assert added(prices, 16, 5) == pytest.approx(5 * SLOPE_MS, rel=0.1)
    assert added(prices, 16, 10) == pytest.approx(10 * SLOPE_MS, rel=0.1)


def test_steps_that_take_longer_by_their_positions_are_not_the_time_of_the_host() -> None:
    """The cost model expects less of a position than it takes beyond sixteen. By its slope alone,
    half of a step would be the host's."""
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(16, true_ms(16))
    for num_drafts in (8, 16, 32):
        learn(prices, 16, num_drafts, true_ms(16 + num_drafts), times=6, slope_ms=0.5)
    assert prices.once_ms <= 0.25 * true_ms(16)


def test_drafts_beyond_the_timed_ones_are_tried_for_half_a_step_at_most() -> None:
    prices = DraftPrices()
    for _ in range(4):
        prices.note_plain(16, true_ms(16))
    learn(prices, 16, 44, 190.0, times=UNTRIED_EVERY + NOTES_PER_MAKE)
    prices.note_plain(16, true_ms(16))
    usual_ms = added(prices, 16, 44) + 30 * SLOPE_MS
    assert usual_ms - added(prices, 16, 74) <= 0.55 * true_ms(16)


def test_points_that_fall_are_pooled_by_their_weight() -> None:
    points = [Point(1, 3.0, 1.0), Point(2, 1.0, 3.0), Point(4, 2.0, 1.0)]
    assert never_falling(points) == [Point(1, 1.5, 4.0), Point(2, 1.5, 4.0), Point(4, 2.0, 1.0)]
    assert len({bucket_of(positions) for positions in range(1, 9)}) == 8


def test_what_later_steps_take_longer_is_part_of_the_price() -> None:
    prices = DraftPrices()
    for _ in range(8):
        prices.note_plain(1, 1.0)
    assert prices.excess_ms(1, 1.5) == 0.0  # before the points are made
    before = prices.added_ms(1, 1, 1.0, SLOPE_MS)[1]
    assert prices.excess_ms(1, 1.5) == pytest.approx(0.5)
    assert prices.excess_ms(1, 9.0) == pytest.approx(2.0)  # something else held it up
    for _ in range(64):
        prices.note_after(0.5)
    assert prices.after_ms == pytest.approx(0.5, abs=0.01)
    assert prices.added_ms(1, 1, 1.0, SLOPE_MS)[1] > before + 0.4
    for _ in range(256):
        prices.fade()
    assert 0.0 < prices.after_ms < 0.1
    for _ in range(64):
        prices.note_after(-0.1)
    assert prices.after_ms == 0.0


def test_a_single_time_that_is_too_high_is_hardly_believed() -> None:
    """Else it would keep so many drafts from being made again. One that is too low is, at first."""
    prices = DraftPrices()
    for _ in range(8):
        prices.note_plain(1, true_ms(1))
        learn(prices, 1, 3, true_ms(4))
        learn(prices, 1, 15, true_ms(16))
    before = added(prices, 1, 8)
    learn(prices, 1, 8, 2.0 * true_ms(9))
    assert added(prices, 1, 8) <= 1.25 * before
    learn(prices, 1, 8, 2.0 * true_ms(9), times=6)  # so it is indeed
    assert added(prices, 1, 8) >= 2.0 * before
