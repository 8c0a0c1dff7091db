"""Attention over a cache of which several ranks have the pieces by turns, in plain PyTorch.

As quire/execute/reference_context.py says: each rank computes the parts of its pieces, for all
heads that its group has; the ranks exchange them (all_to_all), and each merges those of its own
heads in the order of positions, by the operations of one process (plain_attention.py). Knows one
layer of a cache and the exchange of a stage; no program. Always holds: ranks exchange parts of as
many rows and pieces as each other, since all have the same rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.execute.gpu.exchange import TensorExchange
from quire.execute.gpu.kernels.cache_layout import LayerCache
from quire.execute.gpu.plain_attention import Part, RowHeads, rows_at_once
from quire.program.comm_ops import share_of
from quire.program.ops import Attention

_NUMBERS = 2  # beside the values of a part: its largest score and its sum


def context_attention(
    op: Attention, q: Tensor, cache: LayerCache, exchange: TensorExchange, **of_rows: Any
) -> Tensor:
    """q [R, heads * D] over the pieces of all ranks: [R, own heads * D] in float32.

    of_rows: the rest that plain_attention.attention gets.
    """
    first, end = share_of(op.heads, 1, op.rank, op.degree)
    y = torch.zeros(len(q), (end - first) * op.head_dim, dtype=torch.float32, device=q.device)
    for rows, own in rows_at_once(q, cache, **of_rows):
        y[rows] = _merged(op, own, exchange).reshape(-1, y.shape[1])
    return y


def _merged(op: Attention, own: RowHeads, exchange: TensorExchange) -> Tensor:
    """Return the values of this rank's heads [R, own heads, D], over all pieces."""
    rounds = range(own.pieces.start // op.degree, own.pieces.stop // op.degree + 1)
    mine = [turn * op.degree + op.rank for turn in rounds]
    found = torch.zeros(
        len(mine), len(own.q), op.heads, op.head_dim + _NUMBERS, dtype=torch.float32
    )
    for numbers, piece in zip(found, mine, strict=True):
        if piece in own.pieces:
            part = own.part(piece)
            joined = torch.cat([part.y, part.highest, part.total], dim=-1)
            numbers.copy_(joined.reshape(numbers.shape))
    parts = _exchanged(op, found, exchange)
    merged = Part.nothing(parts[0, 0, :, :, None, : op.head_dim])
    for piece in own.pieces:
        numbers = parts[piece % op.degree, piece // op.degree - rounds.start, :, :, None]
        y, highest, total = numbers.split([op.head_dim, 1, 1], dim=-1)
        merged = merged.merged(Part(highest, total, y), own.sees(piece))
    return merged.values()


def _exchanged(op: Attention, found: Tensor, exchange: TensorExchange) -> Tensor:
    """Return [degree, pieces, R, own heads, numbers] of the ranks with the same heads, from those
    of this rank [pieces, R, heads, numbers]. Ranks with other heads get nothing."""
    shares = [share_of(op.heads, 1, rank, op.degree) for rank in range(op.degree)]
    widest = max(end - start for start, end in shares)
    pieces, rows, _, width = found.shape
    given = torch.zeros(exchange.degree, pieces, rows, widest, width)
    first = exchange.rank - op.rank
    for part, (start, end) in zip(given[first:], shares, strict=False):
        part[:, :, : end - start] = found[:, :, start:end]
    taken = torch.empty_like(given)
    exchange.all_to_all(given, taken)
    start, end = shares[op.rank]
    return taken[first : first + op.degree, :, :, : end - start]
