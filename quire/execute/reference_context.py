"""Attention over a cache of which several ranks have the pieces by turns, the twin of the native
one (native/src/context_attention.cc): each rank computes the parts of its pieces, the ranks
exchange them, and each merges those of its heads in the order of positions.

Knows no program and no transport: `all_ranks` returns what all ranks of the group have given it.
Letters as in reference_attention.py; W the most pieces of a rank that any row sees.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.execute.reference_attention import (
    Float32s,
    Int32s,
    PagedRows,
    Part,
    SequenceRows,
    part_of_piece,
    pieces_seen,
)
from quire.program.comm_ops import share_of
from quire.program.declarations import PIECE_POSITIONS
from quire.program.ops import Attention
from quire.program.tensors import DType

Bytes = NDArray[np.uint8]


def context_attention(
    op: Attention,
    q: Float32s,
    keys: PagedRows,
    values: PagedRows,
    *,
    seq_starts: Int32s,
    positions: Int32s,
    block_tables: Int32s,
    dtype: DType,
    first_rank: int,
    all_ranks: Callable[[Bytes], Bytes],
) -> Float32s:
    """q [T, heads * D] over the pieces of all ranks: [T, own heads * D].

    first_rank: the place in the group of the first rank that has the same heads.
    """
    most = -(-(int(positions.max(initial=0)) // PIECE_POSITIONS + 1) // op.degree)
    own = np.zeros((len(q), most, op.heads, op.head_dim + 2), np.float32)
    for sequence, (start, end) in enumerate(pairwise(seq_starts)):
        last = int(positions[start:end].max(initial=0))
        cached = SequenceRows(keys, values, block_tables[sequence], heads=op.heads, end=last + 1)
        for row in range(start, end):
            for piece, seen in pieces_seen(int(positions[row]), op.window):
                if piece % op.degree != op.rank:
                    continue
                part = part_of_piece(
                    q[row].reshape(op.heads, -1),
                    cached,
                    seen,
                    scale=np.float32(op.scale),
                    soft_cap=np.float32(op.soft_cap),
                    dtype=dtype,
                )
                numbers = np.concatenate([part.y, part.highest, part.total], axis=1)
                own[row, piece // op.degree] = numbers
    parts = [
        gathered.view(np.float32).reshape(own.shape)
        for gathered in all_ranks(own.reshape(-1).view(np.uint8))
    ][first_rank : first_rank + op.degree]
    first, last = share_of(op.heads, 1, op.rank, op.degree)
    y = np.empty((len(q), (last - first) * op.head_dim), np.float32)
    for row, position in enumerate(positions):
        merged: Part | None = None
        for piece, _ in pieces_seen(int(position), op.window):
            numbers = parts[piece % op.degree][row, piece // op.degree, first:last]
            part = Part(numbers[:, -2:-1], numbers[:, -1:], numbers[:, :-2])
            merged = part if merged is None else merged.merged(part)
        assert merged is not None, "a row sees its own position"
        y[row] = (merged.y / merged.total).reshape(-1)
    return y
