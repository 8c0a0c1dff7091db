"""int8 activations and products of int8 weights: bitwise equal to the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.execute import reference_ops as ops
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.quant import int_rows
from quire.quant.int_weights import quantize_matrix
from quire.quant.scheme import SCHEMES
from tests.gpu.tensors import Float32s, array, empty, normal, rounded, same_bits, tensor, wide

pytestmark = pytest.mark.gpu


def as_integers(x: Float32s, dtype: str = "f32") -> ByteRows:
    """Quantize by the kernel, into an oversized buffer with old content."""
    room = ByteRows.empty(len(x) + 2, x.shape[1], "cpu")
    room.values.fill_(77)
    room.scales.fill_(float("nan"))
    return quantize_rows(wide(x, dtype), room)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [5, 128, 1290])
def test_quantized_rows_match_the_reference(dtype: str, columns: int) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 4, columns, dtype=dtype)
    x[1] = 0.0
    x[2, 1] = np.inf
    x[3] *= np.float32(2.0**-110)
    expected, found = int_rows.quantize_rows(x), as_integers(x, dtype)
    assert (array(found.values)[:, :columns] == expected.values).all()
    assert not found.values[:, columns:].any()
    assert same_bits(array(found.scales).T.copy(), expected.scales)


def test_halves_are_rounded_to_even() -> None:
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], np.float32)
    assert array(as_integers(x).values)[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 3, 70), (18, 37, 300), (66, 5, 130)])
def test_products_match_the_reference_bit_for_bit(rows: int, outputs: int, columns: int) -> None:
    rng = np.random.default_rng(2)
    x, bias = normal(rng, rows, columns), normal(rng, outputs)
    matrix = quantize_matrix(normal(rng, outputs, columns), SCHEMES["int8"])
    if rows > 1:
        x[1, 1] = np.nan
    weight, found = ByteWeight.of_ints(matrix, "cpu"), empty(rows, outputs)
    linear_bytes(as_integers(x), weight, found, bias=tensor(bias))
    assert same_bits(array(found), ops.int_linear(x, matrix, bias))
    narrow = empty(rows, outputs, "bf16")
    linear_bytes(as_integers(x), weight, narrow)
    assert same_bits(array(narrow), rounded(ops.int_linear(x, matrix, None), "bf16"))


def test_a_row_is_equal_alone_and_among_130() -> None:
    rng = np.random.default_rng(3)
    x = normal(rng, 130, 129)
    weight = ByteWeight.of_ints(quantize_matrix(normal(rng, 7, 129), SCHEMES["int8"]), "cpu")
    together, alone = empty(130, 7), empty(1, 7)
    linear_bytes(as_integers(x), weight, together)
    linear_bytes(as_integers(x[129:]), weight, alone)
    assert same_bits(array(together)[129:], array(alone))


def test_wrong_shapes_are_rejected() -> None:
    matrix = quantize_matrix(np.ones((2, 64), np.float32), SCHEMES["int4-g32"])
    with pytest.raises(ValueError, match="int4-g32"):
        ByteWeight.of_ints(matrix, "cpu")
    with pytest.raises(ValueError, match="at least 3 rows of 128"):
        quantize_rows(torch.zeros(3, 128), ByteRows.empty(2, 128, "cpu"))
