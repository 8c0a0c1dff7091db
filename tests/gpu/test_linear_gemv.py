"""Integer products of one or two rows: bit for bit the reference, divided by columns or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.execute import reference_ops as ops
from quire.execute.gpu.kernels import linear_gemv
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.linear_fixed import Workspace
from quire.execute.gpu.kernels.linear_gemv import MAX_ROWS, gemv, k_split_of, max_gemv_sums
from quire.execute.gpu.products import int_product, pack_ints
from quire.quant.int_weights import IntMatrix, quantize_matrix
from quire.quant.scheme import SCHEMES
from tests.gpu.tensors import Float32s, array, empty, normal, same_bits, tensor

pytestmark = pytest.mark.gpu
INTEGERS = sorted(name for name, scheme in SCHEMES.items() if not scheme.is_float)


def matrix(rng: np.random.Generator, outputs: int, columns: int, scheme: str) -> IntMatrix:
    """Return a skewed weight, so that zero points differ."""
    weight = normal(rng, outputs, columns) + normal(rng, outputs, 1)
    return quantize_matrix(weight, SCHEMES[scheme])


def as_integers(x: Float32s) -> ByteRows:
    """Quantize rows to int8."""
    return quantize_rows(tensor(x), ByteRows.empty(len(x), x.shape[1], "cpu"))


def workspace_for(outputs: int, columns: int, bits: int) -> Workspace:
    """Return scratch of the size that is asked for, filled with NaN."""
    return Workspace.of(max_gemv_sums(outputs, columns, bits), "cpu")


@pytest.mark.parametrize("scheme", INTEGERS)
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "fill"),
    [(1, 5, 40, 1056), (2, 70, 1300, 1056), (2, 70, 650, 1)],  # one program; divided; wide tiles
)
def test_products_match_the_reference_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, scheme: str, rows: int, outputs: int, columns: int, fill: int
) -> None:
    monkeypatch.setattr(linear_gemv, "MIN_PROGRAMS", fill)
    rng, bits = np.random.default_rng(2), SCHEMES[scheme].bits
    whole, x, bias = matrix(rng, outputs, columns, scheme), normal(rng, rows, columns), None
    room = workspace_for(outputs, columns, bits)
    for bias in (None, normal(rng, outputs)):
        found = empty(rows, outputs)
        given = None if bias is None else tensor(bias)
        gemv(as_integers(x), pack_ints(whole, "cpu"), found, workspace=room, bias=given)
        assert same_bits(array(found), ops.int_linear(x, whole, bias))
    assert not room.arrived.any(), "the next launch counts from zero"


def test_few_outputs_are_divided_by_columns_and_many_are_not() -> None:
    assert k_split_of(4096, 112, 4).splits > 4
    assert k_split_of(4096, 32, 8).splits > 4
    assert k_split_of(28672, 32, 4).splits == k_split_of(28672, 32, 8).splits == 1
    for outputs, blocks, bits in ((4096, 112, 4), (4096, 32, 8), (6144, 33, 4), (5, 1, 8)):
        split = k_split_of(outputs, blocks, bits)
        assert (split.splits - 1) * split.per_split < blocks
        assert blocks <= split.splits * split.per_split


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-zp"])
def test_a_row_is_equal_alone_and_among_others(scheme: str) -> None:
    rng, columns, outputs = np.random.default_rng(4), 1100, 70
    x, weight = normal(rng, 40, columns), pack_ints(matrix(rng, outputs, columns, scheme), "cpu")
    room = workspace_for(outputs, columns, SCHEMES[scheme].bits)
    together = empty(40, outputs)
    int_product(as_integers(x), weight, together, workspace=room)
    for rows in (1, 2, 3, 17):
        found = empty(rows, outputs)
        int_product(as_integers(x[:rows]), weight, found, workspace=room)
        assert same_bits(array(found), array(together)[:rows]), rows


def test_a_row_that_is_not_finite_stays_alone() -> None:
    rng = np.random.default_rng(5)
    whole, x = matrix(rng, 70, 1300, "int4-g128"), normal(rng, 2, 1300)
    x[0, 700] = np.nan
    found = empty(2, 70)
    room = workspace_for(70, 1300, 4)
    gemv(as_integers(x), pack_ints(whole, "cpu"), found, workspace=room)
    assert np.isnan(array(found)[0]).all()
    assert same_bits(array(found)[1:], ops.int_linear(x[1:], whole, None))


def test_more_rows_and_too_small_scratch_are_refused() -> None:
    rng = np.random.default_rng(6)
    weight, x = pack_ints(matrix(rng, 70, 1300, "int8"), "cpu"), normal(rng, MAX_ROWS + 1, 1300)
    room = workspace_for(70, 1300, 8)
    with pytest.raises(ValueError, match="at most 2"):
        gemv(as_integers(x), weight, empty(MAX_ROWS + 1, 70), workspace=room)
    small = Workspace(room.sums[:100], room.arrived)
    with pytest.raises(ValueError, match="room for 100 sums"):
        gemv(as_integers(x[:1]), weight, empty(1, 70), workspace=small)
    few = Workspace(room.sums, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="and 1 counters"):
        gemv(as_integers(x[:1]), weight, empty(1, 70), workspace=few)
