"""How many first layers draft: by what a draft costs and how often it is right."""

from __future__ import annotations

import numpy as np
import pytest

from quire.speculative.layer_choice import MeasuredLayers, StepTimes, best_of, candidates


def measured(num: int, pass_ms: float, right: float, length: int = 400) -> MeasuredLayers:
    """Return layers that are right in `right` of the positions, independently of each other."""
    drawn = np.random.default_rng(num).random((16, length)) < right
    return MeasuredLayers(num=num, pass_ms=pass_ms, agrees=drawn)


@pytest.mark.parametrize(
    ("num_layers", "nums"),
    [(2, (1,)), (3, (1, 2)), (5, (1, 2, 3, 4)), (6, (1, 2, 4, 5)), (32, (3, 6, 13, 19, 26))],
)
def test_candidates_leave_out_all_layers(num_layers: int, nums: tuple[int, ...]) -> None:
    assert candidates(num_layers) == nums


@pytest.mark.parametrize(
    ("few", "many", "best"),
    [
        ((1.0, 0.3), (8.0, 0.6), 1),  # twice as often right, for eight times the price
        ((2.0, 0.1), (4.0, 0.95), 4),
        ((2.0, 0.9), (4.0, 0.9), 1),  # more layers that guess no better
        ((2.0, 0.0), (2.0, 0.0), 1),  # of equals the fewest
    ],
)
def test_the_fastest_number_is_chosen(
    few: tuple[float, float], many: tuple[float, float], best: int
) -> None:
    both = [measured(1, *few), measured(4, *many)]
    assert best_of(both, StepTimes(step_ms=10.0, row_ms=0.2), 8).num == best


def test_runs_of_right_drafts_count_more_than_scattered_ones() -> None:
    scattered = np.tile([True, False], (4, 20))
    runs = np.tile([*[True] * 10, *[False] * 10], (4, 2))
    one = MeasuredLayers(num=1, pass_ms=1.0, agrees=scattered)
    other = MeasuredLayers(num=2, pass_ms=1.0, agrees=runs)
    assert one.first == other.first == 0.5
    assert one.further < 0.1
    assert other.further > 0.85
    assert best_of([one, other], StepTimes(step_ms=10.0, row_ms=0.0), 8) is other


def test_the_best_number_of_drafts_is_taken() -> None:
    always = MeasuredLayers(num=1, pass_ms=1.0, agrees=np.ones((2, 9), np.bool_))
    times = StepTimes(step_ms=10.0, row_ms=1.0)
    assert always.tokens_per_ms(times, 4) == pytest.approx(5 / 18)
    never = MeasuredLayers(num=1, pass_ms=1.0, agrees=np.zeros((2, 9), np.bool_))
    assert never.tokens_per_ms(times, 4) == pytest.approx(1 / 12)  # at least one is made
    single = MeasuredLayers(num=1, pass_ms=0.0, agrees=np.ones((1, 1), np.bool_))
    assert single.further == 1.0
