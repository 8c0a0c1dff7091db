"""Grouped matrix products: each slot of a row is multiplied by a matrix of its own.

A slot is one (row, matrix) pair. Slots are sorted by matrix, on the device and without a
synchronization, into blocks of one matrix each (`Groups`). A program makes a tile of outputs of a
block; its chain over K is whole and in order, the same for any number of rows and any block, since
weights are the first operand and rows the second. So the bits of an output depend neither on the
rows beside it nor on which outputs of a matrix are here.

Twin: twins.grouped_rows, within the error of f32 sums. Integers are in grouped_ints.py. Knows no
router. Invariant: slots without a matrix are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, launch_staged, power_of_two
from quire.execute.gpu.kernels.rounding import as_type, dot

STEP = {torch.bfloat16: 64, torch.float32: 32}  # columns of K at a time
FEW_OUTPUTS = 64  # of a tile: the least that Hopper's matrix instructions take
MANY_OUTPUTS = 128  # where blocks are of many rows
BLOCK_ROWS = (16, 32, 64, 128)
SCANNED = 1024  # slots at a time


@triton.jit(do_not_specialize=["slots"])
def _count(ids, counts, slots, BLOCK: tl.constexpr):
    """Count the slots of each matrix."""
    matrix = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < slots, other=-1) == matrix).to(tl.int32)
    tl.store(counts + matrix, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["slots", "num_blocks"])
def _place(
    ids,
    counts,
    order,
    matrices,
    slots,
    num_blocks,
    MATRICES: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place the slots of a matrix, in order, after those of the matrices before."""
    matrix = tl.program_id(0)
    each = tl.arange(0, BM)
    blocks = (tl.load(counts + each, mask=each < MATRICES, other=0) + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(each < matrix, blocks, 0), axis=0)
    end_block = first_block + tl.sum(tl.where(each == matrix, blocks, 0), axis=0)
    place = first_block * ROWS
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        hit = (tl.load(ids + at, mask=at < slots, other=-1) == matrix).to(tl.int32)
        tl.store(order + place + tl.cumsum(hit, axis=0) - 1, at, mask=hit == 1)
        place += tl.sum(hit, axis=0)
    rest = place + tl.arange(0, ROWS)
    tl.store(order + rest, -1, mask=rest < end_block * ROWS)
    for first in range(first_block, end_block, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(matrices + at, matrix, mask=at < end_block)
    if matrix == MATRICES - 1:  # blocks that no matrix has
        for first in range(end_block, num_blocks, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(matrices + at, -1, mask=at < num_blocks)


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """Memory for the Groups of one launch at a time: int32 `counts` by matrix, `slots` and
    `matrices` of all blocks."""

    counts: torch.Tensor
    slots: torch.Tensor
    matrices: torch.Tensor

    @classmethod
    def of(cls, slots: int, count: int, device: torch.device | str) -> GroupRoom:
        """Return room for so many slots of so many matrices, or fewer."""
        sizes = cls.elements(slots, count)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))

    @staticmethod
    def elements(slots: int, count: int) -> tuple[int, int, int]:
        """Return the elements of each, at most."""
        least, most = BLOCK_ROWS[0], BLOCK_ROWS[-1]
        return count, slots + most * (count + 1), cdiv(slots, least) + count


@dataclass(frozen=True, slots=True)
class Groups:
    """slots: int32 [blocks * rows], -1 where a block is not full; matrices: int32 [blocks], -1 of
    blocks past the last, of which the slots say nothing. rows: of a block."""

    slots: torch.Tensor
    matrices: torch.Tensor
    rows: int

    @classmethod
    def of(cls, ids: torch.Tensor, count: int, room: GroupRoom | None = None) -> Groups:
        """Return slots in the order of contiguous ids int32 [n], each the number of one of `count`
        matrices; any other: none. room: that they lie in; None: new memory."""
        slots = ids.numel()
        if room is None:
            room = GroupRoom.of(slots, count, ids.device)
        usual = max(slots // max(count, 1), 1)
        rows = next((rows for rows in BLOCK_ROWS if usual <= rows), BLOCK_ROWS[-1])
        most = cdiv(slots, rows) + min(count, slots)
        order, matrices = room.slots[: most * rows], room.matrices[:most]
        block = power_of_two(slots, least=16, most=SCANNED)
        _count[(count,)](ids, room.counts, slots, BLOCK=block, num_warps=4, **EXACT)
        _place[(count,)](
            ids,
            room.counts,
            order,
            matrices,
            slots,
            most,
            MATRICES=count,
            BM=power_of_two(count),
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
            **EXACT,
        )
        return cls(slots=order, matrices=matrices, rows=rows)


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
        for step in range((K + BK - 1) // BK):
            k = step * BK + ks
            inside = k < K
            columns = tl.load(x_at + k[:, None], mask=inside[:, None], other=0.0)
            total = dot(tl.load(w_at + k[None, :], mask=inside[None, :], other=0.0), columns, total)
        store_slots(total, y, slot, outputs, y_stride, N)


@triton.jit
def store_slots(total, y, slot, outputs, y_stride, N: tl.constexpr):
    """Store a tile [outputs, slots] at the rows of its slots."""
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
) -> None:
    """y [S, N] of each slot s = x [S / slots_a_row, K] at row s // slots_a_row, by its matrix of
    weights [count, N, K].

    x and weights are both bf16 or both f32; y is f32 or bf16. Rows may have any stride.
    """
    columns, outputs = weights.shape[2], y.shape[1]
    check_rows("x", x, cdiv(y.shape[0], slots_a_row), columns)
    check_rows("y", y)
    if weights.shape[1] != outputs or (columns > 1 and weights.stride(2) != 1):
        raise ValueError(
            f"weights are {tuple(weights.shape)}; [any, {outputs}, {columns}] is needed"
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
        num_warps=8 if is_large else 4,
        num_stages=3 if is_large else 4,
        **EXACT,
    )
