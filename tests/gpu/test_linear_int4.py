"""int4 products: bitwise equal to the reference for int8 rows, close to it for bf16 rows."""

from __future__ import annotations

import numpy as np
import pytest

from quire.execute import reference_ops as ops
from quire.execute.gpu import twins
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.int4_layout import Int4Weight, pack
from quire.execute.gpu.kernels.linear_int4 import linear_int4
from quire.quant.int_weights import IntMatrix, quantize_matrix
from quire.quant.scheme import SCHEMES
from tests.gpu.tensors import Float32s, array, empty, normal, rounded, same_bits, tensor, wide

pytestmark = pytest.mark.gpu
INT4 = sorted(name for name in SCHEMES if name.startswith("int4"))


def matrix(rng: np.random.Generator, outputs: int, columns: int, scheme: str) -> IntMatrix:
    """Return a skewed weight, so that zero points differ."""
    weight = normal(rng, outputs, columns) + normal(rng, outputs, 1)
    return quantize_matrix(weight, SCHEMES[scheme])


def as_integers(x: Float32s) -> ByteRows:
    """Quantize rows to int8."""
    return quantize_rows(tensor(x), ByteRows.empty(len(x), x.shape[1], "cpu"))


def test_packed_bytes_follow_the_layout() -> None:
    whole = matrix(np.random.default_rng(1), 65, 200, "int4-g32-zp")
    packed = pack(whole)
    assert packed.shape == (2, 2, 64, 64)
    byte = int(packed[1, 1, 0, 33])  # output 64; run 1 of block 1: columns 192 + 1 and + 33
    assert byte & 15 == whole.values[64, 193] + whole.zeros[64, 193 // 32]
    assert byte >> 4 == whole.zeros[64, -1]  # column 225 is past the end
    assert packed[0, 0, 5, 7] >> 4 == whole.values[5, 39] + whole.zeros[5, 1]


@pytest.mark.parametrize("scheme", INT4)
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 5, 40), (18, 66, 200)])
def test_integer_products_match_the_reference_bit_for_bit(
    scheme: str, rows: int, outputs: int, columns: int
) -> None:
    rng = np.random.default_rng(2)
    whole, x, bias = matrix(rng, outputs, columns, scheme), normal(rng, rows, columns), None
    found = empty(rows, outputs)
    linear_int4(as_integers(x), Int4Weight.of(whole, "cpu"), found)
    assert same_bits(array(found), ops.int_linear(x, whole, bias))


@pytest.mark.parametrize("scheme", INT4)
def test_float_products_are_near_the_reference(scheme: str) -> None:
    rng = np.random.default_rng(3)
    whole, x, bias = matrix(rng, 70, 200, scheme), normal(rng, 3, 200), normal(rng, 70)
    for dtype in ("f32", "bf16"):
        found, rows = empty(3, 70), rounded(x, dtype)
        linear_int4(wide(rows, dtype), Int4Weight.of(whole, "cpu"), found, bias=tensor(bias))
        expected = twins.weight_only(rows, whole, bias)
        np.testing.assert_allclose(array(found), expected, rtol=1e-4, atol=1e-4)


def test_a_row_is_equal_alone_and_among_70() -> None:
    rng = np.random.default_rng(4)
    x, weight = normal(rng, 70, 130), Int4Weight.of(matrix(rng, 7, 130, "int4-g32"), "cpu")
    for rows in (as_integers, tensor):
        together, alone = empty(70, 7), empty(1, 7)
        linear_int4(rows(x), weight, together)
        linear_int4(rows(x[69:]), weight, alone)
        assert same_bits(array(together)[69:], array(alone))


def test_scales_not_representable_in_bf16_stay_f32() -> None:
    whole = matrix(np.random.default_rng(5), 3, 64, "int4-g64-zp")
    odd = IntMatrix(
        scheme=whole.scheme,
        values=whole.values,
        scales=whole.scales * np.float32(1 + 2**-12),
        zeros=whole.zeros,
    )
    x = normal(np.random.default_rng(6), 2, 64)
    found, weight = empty(2, 3), Int4Weight.of(odd, "cpu")
    assert weight.scales.itemsize == 4
    linear_int4(as_integers(x), weight, found)
    assert same_bits(array(found), ops.int_linear(x, odd, None))


def test_an_int8_weight_is_rejected() -> None:
    with pytest.raises(ValueError, match="int8"):
        Int4Weight.of(quantize_matrix(np.ones((2, 64), np.float32), SCHEMES["int8"]), "cpu")
