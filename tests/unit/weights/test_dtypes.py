"""bfloat16 conversion: rounding to nearest even, at boundaries and for special bit patterns."""

from __future__ import annotations

import numpy as np
import pytest

from quire.weights.dtypes import bf16_bits, from_bf16_bits, round_to_bf16


def test_every_bfloat16_value_round_trips() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = from_bf16_bits(bits)
    numbers = ~np.isnan(values)
    assert np.array_equal(bf16_bits(values)[numbers], bits[numbers])
    assert np.isnan(from_bf16_bits(bf16_bits(values[~numbers]))).all()


def test_rounding_takes_the_nearest_and_ties_go_to_even() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64)
    ties = (np.arange(2**15, dtype=np.uint64) << 17) | 0x8000
    values = np.concatenate([bits, ties, ties + 0x10000, ties + 1]).astype(np.uint32)
    values = values.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    found = round_to_bf16(values)
    below = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    above = from_bf16_bits(((below.view(np.uint32) >> 16) + 1).astype(np.uint16))
    exact = values.astype(np.float64)
    to_below, to_above = np.abs(exact - below), np.abs(exact - above)
    even = (below.view(np.uint32) >> np.uint32(16)) % 2 == 0
    right = np.where((to_below < to_above) | ((to_below == to_above) & even), below, above)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("value", [np.inf, -np.inf, 0.0, -0.0])
def test_infinities_and_zeros_keep_their_sign(value: float) -> None:
    found = round_to_bf16(np.array([value], np.float32))
    assert found[0] == value
    assert np.signbit(found[0]) == np.signbit(value)


def test_the_largest_float_rounds_to_infinity() -> None:
    assert round_to_bf16(np.array([np.finfo(np.float32).max], np.float32))[0] == np.inf


def test_every_nan_stays_a_nan() -> None:
    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    assert np.isnan(round_to_bf16(patterns.view(np.float32))).all()
