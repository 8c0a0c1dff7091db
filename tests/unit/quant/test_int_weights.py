"""Stepped scales of int4 groups: what lets 128 of a row be one sum of integers, and its cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.quant.int_weights import STEPS, quantize_matrix
from quire.quant.scheme import ACTIVATION_GROUP, SCHEMES
from quire.weights.dtypes import round_to_bf16

Float32s = NDArray[np.float32]

in_steps = pytest.mark.parametrize("scheme", ["int4-g32", "int4-g64"])


def _weights(rows: int = 64, columns: int = 1024) -> Float32s:
    w = np.random.default_rng(1).standard_t(4, (rows, columns)).astype(np.float32)
    w[0], w[1, :128], w[2] = 0, 0, -np.abs(w[2])
    w[3, 32:128] *= 1e-9  # one group dominates its block
    return w


@in_steps
@pytest.mark.parametrize("columns", [1024, 1000, 160, 40])
def test_scales_of_a_block_are_multiples_of_a_step_that_f32_sums_exactly(
    scheme: str, columns: int
) -> None:
    matrix = quantize_matrix(_weights(64, columns), SCHEMES[scheme])
    of_block = ACTIVATION_GROUP // SCHEMES[scheme].group
    for first in range(0, matrix.scales.shape[1], of_block):
        for row in matrix.scales[:, first : first + of_block].astype(np.float64):
            largest = np.abs(row).max()
            if largest == 0:
                continue
            significand, _ = math.frexp(largest)
            most = dict(STEPS)[int(significand * 128)]
            step = largest / most
            steps = row / step
            assert (steps == np.rint(steps)).all()
            assert np.abs(steps).max() == most <= 15
            odd = math.frexp(step)[0] * 8  # the step's significand, below 8
            assert odd == int(odd)
            assert 127 * ACTIVATION_GROUP * 8 * 15 * odd < 2**24


@in_steps
def test_stepped_scales_lose_little_to_free_ones(scheme: str) -> None:
    """Within 8 % of the error of a group alone in its block, which has a nearly free scale."""
    w = _weights()[4:]
    group = SCHEMES[scheme].group
    parts = np.split(w, w.shape[1] // group, axis=1)
    alone = np.hstack([quantize_matrix(part, SCHEMES[scheme]).dequantized() for part in parts])
    found = quantize_matrix(w, SCHEMES[scheme]).dequantized()
    assert np.square(found - w).sum() < 1.08 * np.square(alone - w).sum()


@in_steps
def test_original_four_bit_weights_are_unchanged(scheme: str) -> None:
    rng = np.random.default_rng(2)
    group = SCHEMES[scheme].group
    codes = rng.integers(-8, 8, (8, 256)).astype(np.float32)
    codes[:, ::group] = -8
    scales = round_to_bf16(rng.uniform(0.01, 0.02, (8, 256 // group)).astype(np.float32))
    w = codes * np.repeat(scales, group, axis=1)
    np.testing.assert_array_equal(quantize_matrix(w, SCHEMES[scheme]).dequantized(), w)
