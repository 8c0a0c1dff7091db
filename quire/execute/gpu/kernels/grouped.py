"""Grouped matrix products: each row is multiplied by the matrices of its experts.

A slot is one (row, expert) pair. Slots are sorted by matrix, on the device and without a
synchronization, into blocks of one matrix each (`Groups`). A program makes a tile of outputs of a
block; its chain over K is whole and in order, the same for any number of rows and any block, since
weights are the first operand and rows the second. A gated product makes gate and up of the same
outputs and stores form(gate) * up.

Twin: twins.grouped_rows, within the error of f32 sums. Knows no router. Invariant: slots
without a matrix are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.curves import activated
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, launch_staged, power_of_two
from quire.execute.gpu.kernels.rounding import as_type, dot

STEP = {torch.bfloat16: 64, torch.float32: 32}  # columns of K at a time
FEW_OUTPUTS = 64  # of a tile: the least that Hopper's matrix instructions take
MANY_OUTPUTS = 128  # where blocks are of many rows
BLOCK_ROWS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Groups:
    """slots: int32 [blocks * rows], -1 where a block is not full; matrices: int32 [blocks], -1 of
    blocks past the last. rows: of a block."""

    slots: torch.Tensor
    matrices: torch.Tensor
    rows: int

    @classmethod
    def of(cls, ids: torch.Tensor, count: int) -> Groups:
        """Slots in the order of ids [n], each the number of one of `count` matrices; -1: none."""
        flat = ids.reshape(-1).to(torch.int64)
        slots, device = flat.numel(), ids.device
        usual = max(slots // max(count, 1), 1)
        rows = next((rows for rows in BLOCK_ROWS if usual <= rows), BLOCK_ROWS[-1])
        keys = torch.where((flat >= 0) & (flat < count), flat, count)
        ordered, origin = torch.sort(keys, stable=True)
        starts = torch.searchsorted(ordered, torch.arange(count + 1, device=device))
        blocks_of = (starts.diff() + rows - 1) // rows
        ends = torch.cumsum(blocks_of, 0)
        most = cdiv(slots, rows) + min(count, slots)
        first = torch.cat([ends - blocks_of, ends.new_full((1,), most)]) * rows
        # Slots without a matrix all go to one place past the end, which is cut off.
        place = torch.where(
            ordered < count, first[ordered] + torch.arange(slots, device=device) - starts[ordered],
            most * rows,
        )  # fmt: skip
        order = torch.full((most * rows + 1,), -1, dtype=torch.int32, device=device)
        order.scatter_(0, place, origin.to(torch.int32))
        owner = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
        matrices = torch.where(owner < count, owner, -1).to(torch.int32)
        return cls(slots=order[: most * rows], matrices=matrices, rows=rows)


@triton.jit
def _grouped(
    x,
    weights,
    y,
    slots,
    matrices,
    x_stride,
    matrix_stride,
    weight_stride,
    y_stride,
    SLOTS_A_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    FORM: tl.constexpr,
):
    matrix = tl.load(matrices + tl.program_id(0))
    if matrix >= 0:
        outputs = tl.program_id(1) * BN + tl.arange(0, BN)
        slot = tl.load(slots + tl.program_id(0) * BR + tl.arange(0, BR))
        ks = tl.arange(0, BK)
        own = weights + matrix.to(tl.int64) * matrix_stride
        w_at = own + tl.where(outputs < N, outputs, 0).to(tl.int64)[:, None] * weight_stride
        row = tl.maximum(slot, 0) // SLOTS_A_ROW
        x_at = x + row.to(tl.int64)[None, :] * x_stride
        total = tl.zeros([BN, BR], tl.float32)
        up = tl.zeros([BN, BR], tl.float32)
        for step in range((K + BK - 1) // BK):
            k = step * BK + ks
            inside = k < K
            columns = tl.load(x_at + k[:, None], mask=inside[:, None], other=0.0)
            total = dot(tl.load(w_at + k[None, :], mask=inside[None, :], other=0.0), columns, total)
            if FORM != "":
                w = tl.load(w_at + N * weight_stride + k[None, :], mask=inside[None, :], other=0.0)
                up = dot(w, columns, up)
        if FORM != "":
            total = activated(total, FORM) * up
        at = y + tl.maximum(slot, 0).to(tl.int64)[None, :] * y_stride + outputs[:, None]
        stored = (slot >= 0)[None, :] & (outputs < N)[:, None]
        tl.store(at, as_type(total, y.dtype.element_ty), mask=stored)


def grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    y: torch.Tensor,
    groups: Groups,
    *,
    slots_a_row: int = 1,
    form: str = "",
) -> None:
    """y [S, N] of each slot s = x [S / slots_a_row, K] at row s // slots_a_row, by its matrix of
    weights [count, N, K] (with `form`: [count, 2 N, K], gate first, and y = form(gate) * up).

    x and weights are both bf16 or both f32; y is f32 or bf16. Rows may have any stride.
    """
    columns, outputs = weights.shape[2], y.shape[1]
    check_rows("x", x, cdiv(y.shape[0], slots_a_row), columns)
    check_rows("y", y)
    wanted = 2 * outputs if form else outputs
    if weights.shape[1] != wanted or (columns > 1 and weights.stride(2) != 1):
        raise ValueError(
            f"weights are {tuple(weights.shape)}; [any, {wanted}, {columns}] is needed"
        )
    if x.dtype != weights.dtype or x.dtype not in STEP:
        raise ValueError(f"x is {x.dtype}, weights {weights.dtype}: both bf16 or f32 are needed")
    if not y.shape[0]:
        return
    is_large = groups.rows == BLOCK_ROWS[-1]
    tile = MANY_OUTPUTS if is_large else FEW_OUTPUTS
    launch_staged(
        _grouped,
        (len(groups.matrices), cdiv(outputs, tile)),
        x,
        weights,
        y,
        groups.slots,
        groups.matrices,
        x.stride(0),
        weights.stride(0),
        weights.stride(1),
        y.stride(0),
        SLOTS_A_ROW=slots_a_row,
        N=outputs,
        K=columns,
        BN=tile,
        BR=groups.rows,
        BK=power_of_two(columns, least=16, most=STEP[x.dtype]),
        FORM=form,
        num_warps=8 if is_large else 4,
        num_stages=3 if is_large else 4,
        **EXACT,
    )
