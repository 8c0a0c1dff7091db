"""Attention of a row from parts that several ranks have computed, one piece of positions each.

Pieces are merged in the order of positions, as merge_partials of attention_walk.py merges those of
one process, by the same function: so the bits do not depend on how many ranks there are. Twin:
reference_context.py, within the error of attention's. Knows parts and rows; no cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.attention_plan import PIECE_POSITIONS
from quire.execute.gpu.kernels.attention_walk import finished, merge_piece
from quire.execute.gpu.kernels.launch import EXACT, check_rows, power_of_two
from quire.execute.gpu.kernels.rounding import as_type

NUMBERS = 2  # of a part beside its values: its largest score and the sum of its probabilities


@triton.jit
def _merge_ranks(
    parts,
    merges,
    positions,
    y,
    rank_stride,
    head_stride,
    slot_stride,
    y_stride,
    window,
    HEADS: tl.constexpr,
    DEGREE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    merge = merges + (tl.program_id(0) // HEADS) * 3
    row, first_slot, place = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    position = tl.load(positions + row)
    first_piece = 0
    if HAS_WINDOW:
        first_piece = tl.maximum(position - window + 1, 0) // PIECE
    one = tl.arange(0, 1)
    columns = tl.arange(0, HEAD_PAD)[None, :]
    own = parts + head.to(tl.int64) * head_stride + place * WIDTH
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    values = tl.zeros((1, HEAD_PAD), tl.float32)
    for piece in tl.range(first_piece, position // PIECE + 1):
        slot = (first_slot + piece // DEGREE).to(tl.int64)
        at = own + slot * slot_stride + rank_stride * (piece % DEGREE)
        piece_values = tl.load(at + columns, mask=columns < HEAD_DIM, other=0.0)
        piece_highest, piece_total = tl.load(at + HEAD_DIM + one), tl.load(at + HEAD_DIM + 1 + one)
        highest, total, values = merge_piece(
            highest, total, values, piece_highest, piece_total, piece_values
        )
    found = as_type(finished(highest, total, values, highest, False), y.dtype.element_ty)
    tl.store(
        y + row.to(tl.int64) * y_stride + head * HEAD_DIM + columns,
        found,
        mask=columns < HEAD_DIM,
    )


def merge_ranks(
    parts: torch.Tensor,
    merges: torch.Tensor,
    positions: torch.Tensor,
    y: torch.Tensor,
    *,
    heads: int,
    window: int = 0,
) -> None:
    """y [T, heads * D] of the rows that are named, from parts f32 [ranks, heads or more, slots,
    tokens, D + 2].

    merges: int32 [R, 3], a row, its first slot, and its token's place in a slot. Piece p of a row's
    positions int32 [T] is of rank p modulo the ranks, in slot p // ranks after the first.
    """
    degree, _, _, _, width = parts.shape
    head_dim = width - NUMBERS
    check_rows("y", y, columns=heads * head_dim)
    if parts.stride(3) != width or parts.stride(4) != 1 or parts.dtype != torch.float32:
        raise ValueError(f"parts are {parts.dtype} with strides {parts.stride()}; f32, contiguous")
    if not len(merges):
        return
    _merge_ranks[(len(merges) * heads,)](
        parts,
        merges,
        positions,
        y,
        parts.stride(0),
        parts.stride(1),
        parts.stride(2),
        y.stride(0),
        window,
        HEADS=heads,
        DEGREE=degree,
        HEAD_DIM=head_dim,
        HEAD_PAD=max(16, power_of_two(head_dim)),
        WIDTH=width,
        PIECE=PIECE_POSITIONS,
        HAS_WINDOW=window > 0,
        num_warps=1,
        **EXACT,
    )
