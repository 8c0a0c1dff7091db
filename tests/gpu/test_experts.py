"""Kernels of mixtures: choices as the reference makes them, grouped products near it or, of
integers, bit for bit; and rows that depend on no other row's choice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.execute.gpu import plain, plain_routing, twins
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.grouped import Groups, grouped
from quire.execute.gpu.kernels.grouped_ints import grouped_ints, stacked
from quire.execute.gpu.kernels.routing import choose_slots, route, weighted_sum
from quire.execute.gpu.load import IntWeight
from quire.execute.gpu.products import pack_ints
from quire.program.expert_ops import Route
from quire.program.forms import RouterScore, RoutingForm
from quire.program.tensors import Buffer, DType, Rows, View
from quire.quant.int_weights import quantize_matrix
from quire.quant.scheme import SCHEMES
from tests.gpu.tensors import array, empty, normal, same_bits, tensor, wide

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CPU = torch.device("cpu")
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}


def ints(values: NDArray[np.integer]) -> torch.Tensor:
    """Convert to int32."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


# ---- the choice


@pytest.mark.parametrize(
    "choice",
    [
        {"top_k": 2},
        {"top_k": 3, "score": RouterScore.SIGMOID, "form": RoutingForm.NORMALIZED, "scale": 2.5},
        {"top_k": 3, "groups": 3, "top_groups": 2, "form": RoutingForm.NORMALIZED},
        {"top_k": 2, "groups": 6, "top_groups": 4, "score": RouterScore.SIGMOID},
    ],
    ids=["softmax", "sigmoid", "groups", "groups of one"],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing_weights_match_the_reference(choice: dict[str, Any], has_bias: bool) -> None:
    experts = 6
    view = View(Buffer(0, "logits", Rows.TOKENS, experts, DType.F32), 0, experts)
    op = Route(
        x=view, y=view, **{"score": RouterScore.SOFTMAX, "form": RoutingForm.SCORES} | choice
    )
    rng = np.random.default_rng(2)
    logits = normal(rng, 9, experts)
    logits[1] = logits[1, 0]  # a tie goes to the lower id
    logits[2, 3] = np.nan
    logits[3, :2] = np.inf, -np.inf
    bias = np.array([0, 3, 0, -3, 1, 0], np.float32) if has_bias else None
    expected = plain_routing.route(
        op, torch.from_numpy(logits.copy()), None if bias is None else torch.from_numpy(bias)
    )
    y = empty(9, experts)
    route(
        wide(logits, "f32"),
        None if bias is None else tensor(bias),
        y,
        top_k=op.top_k,
        groups=op.groups,
        top_groups=op.top_groups,
        scale=op.scale,
        is_sigmoid=op.score is RouterScore.SIGMOID,
        is_normalized=op.form is RoutingForm.NORMALIZED,
    )
    np.testing.assert_allclose(array(y), expected.numpy(), rtol=1e-5, atol=1e-6)
    alone = empty(1, experts)
    route(
        tensor(logits[4:5]),
        None if bias is None else tensor(bias),
        alone,
        top_k=op.top_k,
        groups=op.groups,
        top_groups=op.top_groups,
        scale=op.scale,
        is_sigmoid=op.score is RouterScore.SIGMOID,
        is_normalized=op.form is RoutingForm.NORMALIZED,
    )
    assert same_bits(array(alone), array(y)[4:5])


def test_slots_are_the_first_chosen_experts_of_rows_that_count() -> None:
    routing = np.array(
        [[0, 0.5, 0, 0.25, 0], [0, 0, 0, 0, 0], [1, 2, 3, 0, 0], [0, np.nan, 0, 0, 1], [9] * 5],
        np.float32,
    )
    ids, shares = torch.full((5, 2), 7, dtype=torch.int32), torch.zeros(5, 2)
    loads = torch.zeros(5, dtype=torch.int64)
    starts = torch.tensor([0, 1, 4, 99], dtype=torch.int32)
    choose_slots(tensor(routing), ids, shares, starts=starts, sequences=2, loads=loads)
    assert ids.tolist() == [[1, 3], [-1, -1], [0, 1], [1, 4], [-1, -1]]
    np.testing.assert_array_equal(
        shares.numpy(), np.array([[0.5, 0.25], [0, 0], [1, 2], [np.nan, 1], [0, 0]], np.float32)
    )
    assert loads.tolist() == [1, 3, 0, 1, 1]


def test_outputs_are_added_in_order_wherever_they_were_computed() -> None:
    rng = np.random.default_rng(3)
    outputs, ids = normal(rng, 8, 5), np.array([[0, 1], [2, -1], [-1, -1], [0, 3]])
    shares = np.abs(normal(rng, 4, 2))
    owners = np.array([[0, 1], [1, -1], [-1, -1], [1, 0]])
    parts = np.full((2, 8, 6), np.nan, np.float32)
    for slot, owner in enumerate(owners.reshape(-1)):
        if owner >= 0:
            parts[owner, slot, :5] = outputs[slot]
    expected = np.zeros((4, 5), np.float32)
    for row, slot in np.argwhere(ids >= 0):
        expected[row] += outputs[2 * row + slot] * shares[row, slot]
    one, two = empty(4, 5), empty(4, 5)
    weighted_sum(tensor(outputs), ints(ids), tensor(shares), one)
    weighted_sum(tensor(parts), ints(ids), tensor(shares), two, owners=ints(owners))
    np.testing.assert_allclose(array(one), expected, rtol=1e-6, atol=1e-6)
    assert same_bits(array(one), array(two))


# ---- products


@pytest.mark.parametrize(("slots", "count"), [(1, 4), (40, 3), (200, 2), (5, 60), (1100, 2)])
def test_groups_hold_each_slot_once_in_blocks_of_one_matrix(slots: int, count: int) -> None:
    rng = np.random.default_rng(slots)
    ids = rng.integers(-1, count + 1, slots)
    groups = Groups.of(ints(ids), count)
    blocks = groups.slots.reshape(-1, groups.rows).tolist()
    found = []
    for block, matrix in zip(blocks, groups.matrices.tolist(), strict=True):
        if matrix < 0:
            continue
        held = [slot for slot in block if slot >= 0]
        assert held
        assert all(ids[slot] == matrix for slot in held)
        assert block == held + [-1] * (groups.rows - len(held))
        found += held
    assert sorted(found) == [slot for slot in range(slots) if 0 <= ids[slot] < count]


def test_no_row_with_a_matrix() -> None:
    groups = Groups.of(ints(np.full(3, -1)), 2)
    y = empty(3, 5)
    grouped(tensor(np.ones((3, 4), np.float32)), torch.ones(2, 5, 4), y, groups)
    assert torch.isnan(y).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_products_match_the_reference_and_depend_on_no_other_row(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 27, 70, dtype=dtype)  # 32 rows per block, and 16 of a row alone
    weights = normal(rng, 3, 40, 70, dtype=dtype)
    ids = rng.integers(-1, 3, (27, 2))

    def ask(rows: slice) -> NDArray[np.float32]:
        y = empty(2 * len(x[rows]), 40)
        groups = Groups.of(ints(ids[rows]), 3)
        grouped(wide(x[rows], dtype), tensor(weights, dtype), y, groups, slots_a_row=2)
        return array(y)

    together, has = ask(slice(None)), ids.reshape(-1) >= 0
    expected = twins.grouped_rows(np.repeat(x, 2, axis=0), weights, ids.reshape(-1))
    np.testing.assert_allclose(together[has], expected[has], rtol=1e-4, atol=1e-4)
    assert np.isnan(together[~has]).all(), "slots without a matrix are not written"
    for row in (0, 26):
        assert same_bits(ask(slice(row, row + 1)), together[2 * row : 2 * row + 2])


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g64", "int4-g128-zp"])
def test_integer_products_have_the_bits_of_each_matrix_alone(scheme: str) -> None:
    rng = np.random.default_rng(4)
    matrices = [
        quantize_matrix(normal(rng, 40, 160) * 10.0**power, SCHEMES[scheme]) for power in range(3)
    ]
    weights = stacked([pack_ints(matrix, CPU) for matrix in matrices], CPU)
    plains = [IntWeight.of(matrix, CPU) for matrix in matrices]
    x, ids = tensor(normal(rng, 30, 160)), rng.integers(-1, 3, (30, 2))
    rows = quantize_rows(x, ByteRows.empty(30, 160, CPU))
    y = empty(60, 40)
    grouped_ints(rows, weights, y, Groups.of(ints(ids), 3), slots_a_row=2)
    for slot, expert in enumerate(ids.reshape(-1).tolist()):
        if expert < 0:
            assert torch.isnan(y[slot]).all()
            continue
        one = plains[expert]
        expected = plain.int_linear(
            x[slot // 2 : slot // 2 + 1], one.values, one.scales, one.scheme, None
        )
        assert torch.equal(y[slot : slot + 1], expected), (slot, expert)


def test_wrong_shapes_are_rejected() -> None:
    x, groups = torch.zeros(2, 8), Groups.of(torch.zeros(2, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"\[any, 3, 8\]"):
        grouped(x, torch.zeros(1, 4, 8), torch.zeros(2, 3), groups)
    rows = ByteRows.empty(2, 8, CPU, dtype=torch.float8_e4m3fn)
    matrix = quantize_matrix(np.ones((4, 8), np.float32), SCHEMES["int8"])
    with pytest.raises(ValueError, match="int8 by block"):
        grouped_ints(rows, stacked([pack_ints(matrix, CPU)], CPU), torch.zeros(2, 4), groups)
