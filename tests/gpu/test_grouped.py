"""Experts and adapters: values near the reference, and rows that depend on no other row's
choice.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.execute.gpu import twins
from quire.execute.gpu.kernels.experts import experts
from quire.execute.gpu.kernels.grouped import Groups, grouped
from tests.gpu.tensors import Float32s, array, empty, normal, rounded, same_bits, tensor, wide

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}


def ints(values: NDArray[np.integer]) -> torch.Tensor:
    """Convert to int32."""
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


@pytest.mark.parametrize(("slots", "count"), [(1, 4), (40, 3), (200, 2), (5, 60)])
def test_groups_hold_each_slot_once_in_blocks_of_one_matrix(slots: int, count: int) -> None:
    rng = np.random.default_rng(slots)
    ids = rng.integers(-1, count + 1, slots)
    groups = Groups.of(ints(ids), count)
    blocks = groups.slots.reshape(-1, groups.rows).tolist()
    found = []
    for block, matrix in zip(blocks, groups.matrices.tolist(), strict=True):
        held = [slot for slot in block if slot >= 0]
        assert all(ids[slot] == matrix for slot in held)
        assert bool(held) == (matrix >= 0)
        found += held
    assert sorted(found) == [slot for slot in range(slots) if 0 <= ids[slot] < count]


def test_no_row_with_a_matrix() -> None:
    groups = Groups.of(ints(np.full(3, -1)), 2)
    y = empty(3, 5)
    grouped(tensor(np.ones((3, 4), np.float32)), torch.ones(2, 5, 4), y, groups)
    assert torch.isnan(y).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_expert_products_match_the_reference(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 27, 70, dtype=dtype)  # 32 rows per block, and 16 of a row alone
    gate_up, down = normal(rng, 3, 2 * 36, 70, dtype=dtype), normal(rng, 3, 70, 36, dtype=dtype)
    gate_up, down = rounded(gate_up / 8, dtype), rounded(down / 8, dtype)
    ids, shares = rng.integers(-1, 3, (27, 2)), np.abs(normal(rng, 27, 2))

    def ask(rows: slice) -> Float32s:
        y = empty(len(x[rows]), 70, dtype)
        some_shares = tensor(np.ascontiguousarray(shares[rows]))
        matrices = tensor(gate_up, dtype), tensor(down, dtype)
        experts(wide(x[rows], dtype), *matrices, ints(ids[rows]), some_shares, y)
        return array(y)

    together = ask(slice(None))
    expected = twins.experts(
        x, gate_up, down, ids, shares, form="silu", stored=lambda y: rounded(y, dtype)
    )
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(together, expected, rtol=tolerance, atol=tolerance)
    for row in (0, 26):
        assert same_bits(ask(slice(row, row + 1)), together[row : row + 1])


def test_wrong_shapes_are_rejected() -> None:
    x, groups = torch.zeros(2, 8), Groups.of(torch.zeros(2, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match=r"\[any, 6, 8\]"):
        grouped(x, torch.zeros(1, 3, 8), torch.zeros(2, 3), groups, form="silu")
