"""int8 and int4 packing matches the NumPy reference for any storage, division and thread count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.quant.int_weights import IntMatrix, coarse_rows, quantize_matrix
from quire.quant.scheme import INT_SCHEMES, SCHEMES
from quire.weights.dtypes import bf16_bits, round_to_bf16
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.kernels.one_op import OneOp, Operand, draw, packed

Float32s = NDArray[np.float32]

each_isa = each_case("isa", ISAS)
each_scheme = each_case("scheme", INT_SCHEMES)
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38)


def _read(weight: _native.Weight) -> Float32s:
    return np.array([weight.row(row) for row in range(weight.rows)], np.float32)


@each_isa
@each_scheme
@each_case(("rows", "columns"), [(1, 1), (5, 96), (33, 67), (64, 320), (70, 1101)])
def test_packed_bytes_decode_as_the_reference(
    scheme: str, isa: str, rows: int, columns: int
) -> None:
    w = draw(np.random.default_rng(columns), rows, columns)
    w[rows // 2] = 0
    found = packed(_native.Pool(2, isa=isa), "matrix", scheme, w)
    np.testing.assert_array_equal(_read(found), quantize_matrix(w, SCHEMES[scheme]).dequantized())


@each_isa
@each_scheme
def test_non_finite_values_affect_only_their_group(scheme: str, isa: str) -> None:
    w = draw(np.random.default_rng(3), 40, 256)
    for row, special in enumerate(SPECIALS):
        w[row * 4, 70] = special
    found = _read(packed(_native.Pool(1, isa=isa), "matrix", scheme, w))
    np.testing.assert_array_equal(found, quantize_matrix(w, SCHEMES[scheme]).dequantized())
    group = SCHEMES[scheme].group or 256
    hurt = np.zeros_like(w, bool)
    rows = [0, 4, 8] if SCHEMES[scheme].bits == 8 else [0, 4, 8, 24, 28]
    hurt[rows, 70 // group * group : (70 // group + 1) * group] = True
    np.testing.assert_array_equal(np.isnan(found), hurt)


@each_isa
@each_case("columns", [384, 1101])
def test_rows_dominated_by_few_elements_are_counted(isa: str, columns: int) -> None:
    w = draw(np.random.default_rng(columns), 70, columns)
    w[11] = 0
    w[12, :-3] = 0  # few nonzero elements, all alike
    w[13, 5], w[14, 5] = np.nan, np.inf
    pool = _native.Pool(2, isa=isa)
    assert coarse_rows(w) == packed(pool, "matrix", "int8", w).coarse_rows == 0
    w[20:29, 40] = 100
    w[33:36, [1, 50]] = -200
    w[:, 60] *= 6  # as in trained models
    weight = packed(pool, "matrix", "int8", w)
    assert coarse_rows(w) == weight.coarse_rows == 12
    assert packed(pool, "matrix", "int4-g32", w).coarse_rows == 0


@each_scheme
@each_case("stored", ["f32", "f16", "bf16"])
@each_case("transposed", [False, True])
@each_case("num_threads", [1, 3])
def test_parts_of_any_tensor_meet_inside_a_panel(
    scheme: str, stored: str, transposed: bool, num_threads: int
) -> None:
    rng = np.random.default_rng(3)
    drawn = rng.standard_normal((150, 131)).astype(np.float16).astype(np.float32)
    values: Any = round_to_bf16(drawn) if stored == "bf16" else drawn
    lying = values.T.copy() if transposed else values
    raw = {"f32": lying, "f16": lying.astype(np.float16), "bf16": bf16_bits(lying)}[stored]
    source = raw.view(np.uint8).ravel()
    pool = _native.Pool(num_threads)
    weight = _native.Weight("matrix", "bf16", 101, 131, scheme)
    taken = []
    for first, last, first_row in ((0, 5, 2), (5, 77, 78), (77, 101, 40)):
        digest = weight.fill(
            pool, first, last - first, source, stored, 0.5,
            first_row=first_row, of_rows=150, transposed=transposed, digested=first == 0,
        )  # fmt: skip
        assert digest == (_native.content_digest(source) if first == 0 else None)
        taken.append(values[first_row : first_row + last - first] + np.float32(0.5))
    expected = quantize_matrix(np.concatenate(taken), SCHEMES[scheme]).dequantized()
    np.testing.assert_array_equal(_read(weight), expected)


@each_isa
@each_scheme
@each_case("out", ["f32", "bf16"])
def test_rows_gathered_from_integers_are_what_the_product_uses(
    scheme: str, isa: str, out: str
) -> None:
    w = draw(np.random.default_rng(6), 50, 77)
    op = OneOp(
        "embed", [Operand(77, out)], isa, values={"ids": "tokens"}, weights=[("matrix", scheme, w)]
    )
    ids = np.array([49, 0, 31, 32, 31], np.int32)
    (found,) = op({}, num_rows=5, batch={"token_ids": ids})
    expected = quantize_matrix(w, SCHEMES[scheme]).dequantized()[ids]
    np.testing.assert_array_equal(found, round_to_bf16(expected) if out == "bf16" else expected)


@each_scheme
@each_case("columns", [1, 32, 96, 128, 1024])
def test_byte_counts_are_those_of_the_scheme_plus_padding(scheme: str, columns: int) -> None:
    weight = _native.Weight("matrix", "f32", 64, columns, scheme)
    counted = 64 * SCHEMES[scheme].row_bytes(columns)
    assert counted <= weight.num_bytes
    if columns % 128 == 0 and scheme != "int4-g128-zp":
        assert weight.num_bytes == counted


def test_only_a_matrix_can_be_quantized_and_a_scheme_must_be_known() -> None:
    with pytest.raises(ValueError, match="only a matrix"):
        _native.Weight("table", "f32", 4, 4, "int8")
    with pytest.raises(ValueError, match='weight scheme "int5"'):
        _native.Weight("matrix", "f32", 4, 4, "int5")


@each_scheme
def test_the_scale_search_reduces_the_error(scheme: str) -> None:
    """No worse than plain rounding to absmax, and better with few outliers."""
    w = draw(np.random.default_rng(8), 64, 1024)
    matrix = quantize_matrix(w, SCHEMES[scheme])
    assert _error(matrix, w) <= _plain_error(w, matrix) * (1.0001 if matrix.scheme.bits == 8 else 1)
    assert np.abs(matrix.dequantized() - w).max() < np.abs(w).max() * 0.2


def _error(matrix: IntMatrix, w: Float32s) -> float:
    return float(np.square(matrix.dequantized() - w, dtype=np.float64).sum())


def _plain_error(w: Float32s, matrix: IntMatrix) -> float:
    """Return the error of symmetric rounding with the scale absmax / (2^(bits - 1) - 1)."""
    group = matrix.scheme.group or w.shape[1]
    groups = w.reshape(len(w), -1, group)
    steps = 127 if matrix.scheme.bits == 8 else 7
    scale = np.abs(groups).max(axis=2, keepdims=True) / steps
    return float(np.square(np.rint(groups / scale) * scale - groups, dtype=np.float64).sum())
