"""Row quantization, and a fused multiply-add computed in float64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.quant.int_rows import TINY, fma, quantize_rows
from tests.drawn import examples

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _nearest(value: Fraction) -> np.float32:
    """Return the float32 nearest to a rational number, ties to even."""
    with np.errstate(over="ignore"):  # the neighbour of the largest is infinite, left out below
        guess = np.float32(float(value))
        candidates = [np.nextafter(guess, np.float32(-np.inf)), guess]
        candidates.append(np.nextafter(guess, np.float32(np.inf)))
    finite = [one for one in candidates if np.isfinite(one)]
    return min(
        finite, key=lambda one: (abs(Fraction(float(one)) - value), int(one.view(np.uint32)) & 1)
    )


@settings(max_examples=examples(500), deadline=None)
@given(FLOATS, FLOATS, FLOATS)
def test_a_fused_multiply_add_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if abs(exact) > Fraction(float(np.finfo(np.float32).max)):
        return
    found = fma(np.float32([a]), np.float32([b]), np.float32([c]))[0]
    assert found == _nearest(exact)


def test_a_sum_that_float64_rounds_onto_a_tie_is_not_rounded_twice() -> None:
    # 1 + 2^-24 is a tie; 2^-60 below it must round down, above it up.
    one = np.float32([1, 1])
    a, b = np.float32([2.0**-30, 2.0**-30]), np.float32([-(2.0**-30), 2.0**-30])
    tie = np.float32([2.0**-24, 2.0**-24])
    exact = fma(np.float32([1, 1]), tie, one)  # the tie itself goes to even
    assert exact.tolist() == [1, 1]
    low = fma(a, b, np.nextafter(one, np.float32(2)))
    assert low.tolist() == [1 + 2.0**-23] * 2
    scale = np.float32([1 + 2.0**-12, 1 + 2.0**-12])
    part = np.float32([2.0**-24 * (1 - 2.0**-12), 2.0**-24 * (1 + 2.0**-12)])
    assert fma(scale, part, one).tolist() == [1, 1 + 2.0**-23]


def test_a_row_is_divided_into_groups_of_128_with_their_own_scales() -> None:
    x = np.zeros((2, 300), np.float32)
    x[0, :128] = np.linspace(-127, 100, 128)
    x[0, 128:256] = 0.5
    x[1, 299] = -3
    rows = quantize_rows(x)
    assert rows.scales.shape == (2, 3)
    assert rows.scales[0].tolist() == [1, np.float32(0.5) / np.float32(127), 0]
    assert rows.values[0, 0] == -127
    assert (rows.values[0, 128:256] == 127).all()
    assert rows.values[1, 299] == -127
    assert not rows.values[1, :299].any()


def test_halves_are_rounded_to_even() -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    assert quantize_rows(x).values.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_non_finite_values_make_their_group_nan_and_tiny_ones_zero() -> None:
    x = np.ones((3, 256), np.float32)
    x[0, 3], x[1, 200] = np.inf, np.nan
    x[2, :128] = TINY / 2
    rows = quantize_rows(x)
    assert np.isnan(rows.scales).tolist() == [[True, False], [False, True], [False, False]]
    assert not rows.values[0, :128].any()
    assert rows.scales[2, 0] == 0
    assert not rows.values[2, :128].any()
