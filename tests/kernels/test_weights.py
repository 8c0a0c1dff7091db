"""Packing: checkpoint values reach panels and tables bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.weights.dtypes import bf16_bits, from_bf16_bits, round_to_bf16
from tests.cases import each_case

Float32s = NDArray[np.float32]


def _fill(weight: _native.Weight, first: int, values: NDArray[np.generic], dtype: str) -> None:
    pool = _native.Pool(2)
    weight.fill(pool, first, len(values), values.view(np.uint8).ravel(), dtype)


def _read(weight: _native.Weight) -> Float32s:
    return np.array([weight.row(row) for row in range(weight.rows)], np.float32)


@each_case("dtype", ["f32", "bf16"])
@each_case("form", ["matrix", "table"])
@each_case("columns", [1, 64, 67])
def test_fused_parts_meet_inside_a_panel(dtype: str, form: str, columns: int) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((101, columns)).astype(np.float32)
    weight = _native.Weight(form, dtype, 101, columns)
    for first, last in ((0, 5), (5, 77), (77, 101)):
        _fill(weight, first, values[first:last].copy(), "f32")
    expected = round_to_bf16(values) if dtype == "bf16" else values
    np.testing.assert_array_equal(_read(weight), expected)


@each_case("dtype", ["f32", "bf16"])
def test_every_f16_value_is_widened_exactly(dtype: str) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    weight = _native.Weight("matrix", dtype, 64, 1024)
    _fill(weight, 0, halves, "f16")
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32)
    finite = np.isfinite(expected)
    expected = round_to_bf16(expected) if dtype == "bf16" else expected
    found = _read(weight)
    np.testing.assert_array_equal(found[finite], expected[finite])
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


def test_bf16_sources_keep_their_bits_and_widen_exactly() -> None:
    bits = np.arange(0, 65536, 3, dtype=np.uint16)[: 21 * 1024].reshape(21, 1024)
    values = from_bf16_bits(bits)
    for dtype in ("f32", "bf16"):
        weight = _native.Weight("table", dtype, 21, 1024)
        _fill(weight, 0, bits, "bf16")
        np.testing.assert_array_equal(_read(weight), values)


def test_an_offset_is_added_in_f32_before_rounding() -> None:
    values = np.array([[0.001, -1.0, 3.0]], np.float32)
    weight = _native.Weight("table", "bf16", 1, 3)
    weight.fill(_native.Pool(1), 0, 1, bf16_bits(values).view(np.uint8).ravel(), "bf16", 1.0)
    expected = round_to_bf16(round_to_bf16(values) + np.float32(1))
    np.testing.assert_array_equal(_read(weight), expected)


@each_case("stored", ["f32", "f16", "bf16"])
@each_case("dtype", ["f32", "bf16"])
@each_case("form", ["matrix", "table"])
@each_case("transposed", [False, True])
@each_case("num_threads", [1, 3])
def test_rows_are_cut_from_a_larger_tensor_of_any_layout(
    stored: str, dtype: str, form: str, transposed: bool, num_threads: int
) -> None:
    rng = np.random.default_rng(3)
    drawn = rng.standard_normal((150, 67)).astype(np.float16).astype(np.float32)
    values: Any = round_to_bf16(drawn) if stored == "bf16" else drawn
    lying = values.T.copy() if transposed else values
    raw = {"f32": lying, "f16": lying.astype(np.float16), "bf16": bf16_bits(lying)}[stored]
    source = raw.view(np.uint8).ravel()
    pool = _native.Pool(num_threads)
    weight = _native.Weight(form, dtype, 101, 67)
    taken = []
    for first, last, first_row in ((0, 5, 2), (5, 77, 78), (77, 101, 40)):
        digest = weight.fill(
            pool, first, last - first, source, stored,
            first_row=first_row, of_rows=150, transposed=transposed, digested=first == 0,
        )  # fmt: skip
        assert digest == (_native.content_digest(source) if first == 0 else None)
        taken.append(values[first_row : first_row + last - first])
    expected = np.concatenate(taken)
    np.testing.assert_array_equal(
        _read(weight), round_to_bf16(expected) if dtype == "bf16" else expected
    )


def test_elements_are_cut_from_a_longer_vector_and_offset() -> None:
    values = np.arange(10, dtype=np.float32)
    weight = _native.Weight("vector", "f32", 4, 1)
    weight.fill(_native.Pool(1), 0, 4, values.view(np.uint8), "f32", 1.0, first_row=3, of_rows=10)
    assert _read(weight).ravel().tolist() == [4, 5, 6, 7]


def test_wrong_sizes_are_rejected_with_the_numbers() -> None:
    weight = _native.Weight("matrix", "f32", 4, 3)
    source = np.zeros(24, np.uint8)
    with pytest.raises(ValueError, match=r"24 source bytes; 4 rows take 48"):
        weight.fill(_native.Pool(1), 0, 4, source, "f32")
    with pytest.raises(IndexError, match=r"rows 3 to 5 of a weight of 4"):
        weight.fill(_native.Pool(1), 3, 2, source, "f32")
    with pytest.raises(IndexError, match=r"rows 1 to 3 of a source of 2"):
        weight.fill(_native.Pool(1), 0, 2, source, "f32", first_row=1, of_rows=2)
    with pytest.raises(IndexError, match=r"rows -1 to 1 of a source of 2"):
        weight.fill(_native.Pool(1), 0, 2, source, "f32", first_row=-1, of_rows=2)
    with pytest.raises(ValueError, match="source dtype"):
        weight.fill(_native.Pool(1), 0, 2, source, "f8")
