"""Weights and rows in fp8: e4m3 codes, scales by row and block, non-finite values."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execute import reference_ops as ops
from quire.quant.fp8 import OF_CODES, e4m3, quantize_fp8, quantize_fp8_rows
from quire.quant.scheme import SCHEMES

FINITE = np.sort(OF_CODES[np.isfinite(OF_CODES)])


def test_rounding_is_to_the_nearest_code_and_ties_go_to_even_ones() -> None:
    assert (FINITE[0], FINITE[-1], len(np.unique(FINITE))) == (-448, 448, 253)
    np.testing.assert_array_equal(e4m3(FINITE), FINITE)
    above_zero = OF_CODES[:127]
    between = (above_zero[:-1] + above_zero[1:]) / 2
    even = np.where(np.arange(126) % 2 == 0, above_zero[:-1], above_zero[1:])
    np.testing.assert_array_equal(e4m3(between), even)
    x = np.random.default_rng(1).standard_normal(2_000).astype(np.float32) * 20
    nearest = np.abs(x[:, None] - FINITE).min(axis=1)
    np.testing.assert_array_equal(np.abs(x - e4m3(x)), nearest)
    assert e4m3(np.array([1e9, -460.0], np.float32)).tolist() == [448, -448]


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_elements_are_within_a_sixteenth_of_themselves(scheme: str) -> None:
    w = np.random.default_rng(2).standard_normal((150, 200)).astype(np.float32)
    found = quantize_fp8(w, SCHEMES[scheme])
    assert set(np.unique(found.values)) <= set(FINITE)
    assert found.scales.shape == ((150, 1) if scheme == "fp8" else (2, 2))
    error = np.abs(found.dequantized() - w)
    # Half a step of 8 per power of two, or of the smallest numbers.
    least = np.abs(w).max() / 448 * 2.0**-10
    assert (error <= np.maximum(np.abs(w) / 16, least) * 1.0001).all()


def test_the_scale_of_each_row_and_block_follows_its_largest_element() -> None:
    w = np.ones((130, 260), np.float32)
    w[129], w[0, 259] = 448, -896
    by_row = quantize_fp8(w, SCHEMES["fp8"]).scales[:, 0]
    assert by_row[[0, 1, 129]].tolist() == [2, np.float32(1) / np.float32(448), 1]
    small = np.float32(1) / np.float32(448)
    blocks = quantize_fp8(w, SCHEMES["fp8-block"]).scales
    assert blocks.tolist() == [[small, small, 2], [1, 1, 1]]


def test_non_finite_and_tiny_values_affect_only_their_row_or_block() -> None:
    w = np.ones((256, 256), np.float32)
    w[3, 3], w[128:, :128] = np.nan, 2.0**-110
    by_row = quantize_fp8(w, SCHEMES["fp8"]).dequantized()
    assert np.isnan(by_row).all(axis=1).nonzero()[0].tolist() == [3]
    assert not by_row[200, :128].any()
    by_block = quantize_fp8(w, SCHEMES["fp8-block"]).dequantized()
    assert np.isnan(by_block[:128, :128]).all()
    assert not np.isnan(by_block[128:]).any()
    assert not by_block[128:, :128].any()


@pytest.mark.parametrize("by_block", [False, True])
def test_a_row_of_activations_is_equal_alone_and_in_a_batch(by_block: bool) -> None:
    x = np.random.default_rng(3).standard_normal((7, 200)).astype(np.float32)
    values, scales = quantize_fp8_rows(x, by_block=by_block)
    alone, alone_scales = quantize_fp8_rows(x[4:5], by_block=by_block)
    np.testing.assert_array_equal(values[4:5], alone)
    np.testing.assert_array_equal(scales[4:5], alone_scales)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_products_are_near_those_of_f32_and_keep_the_row_rule(scheme: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((9, 300)).astype(np.float32)
    w, bias = rng.standard_normal((140, 300)).astype(np.float32), np.ones(140, np.float32)
    x[2, 5] = np.inf
    weight = quantize_fp8(w, SCHEMES[scheme])
    found = ops.fp8_linear(x, weight, bias)
    right = ops.linear(x, w, bias)
    assert np.isnan(found).any(axis=1).nonzero()[0].tolist() == [2]
    rows = [0, 1, 3, 8]
    error = np.abs(found[rows] - right[rows]) / np.sqrt(300)
    # Each factor errs by 2.6 % (root mean square): so does a product of many, times root two.
    assert np.sqrt((error**2).mean()) < 0.045
    np.testing.assert_array_equal(found[8:], ops.fp8_linear(x[8:], weight, bias))
