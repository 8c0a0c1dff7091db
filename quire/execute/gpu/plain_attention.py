"""Store keys and values, and attend to them, in plain PyTorch: piece by piece, by sums and curves
of which a head's bits depend on that head alone (plain_curves.py).

The recipe is quire/execute/reference_attention.py's: pieces of 256 positions aligned to absolute
position, merged in order, probabilities rounded to the cache's dtype before the product with V.
Knows one layer of a cache (kernels/cache_layout.py). Letters: R rows, P positions of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from quire.execute.gpu import plain_curves
from quire.execute.gpu.kernels.cache_layout import LayerCache
from quire.execute.gpu.plain import E4M3, quantize_groups

PIECE_POSITIONS = 256
# Of a piece that is computed, at least; and elements of queries by positions at once, at most.
_MIN_POSITIONS, _ELEMENTS_AT_ONCE = 16, 1 << 21


def store(cache: LayerCache, k: Tensor, v: Tensor, kv_slots: Tensor, *, dtype: torch.dtype) -> None:
    """Write rows k and v [R, kv_heads * D] at slots, -1 nowhere; rounded to `dtype` first."""
    stored = kv_slots >= 0
    slots = kv_slots[stored].long()
    block, token = slots // cache.block_size, slots % cache.block_size
    for side, rows in enumerate((k, v)):
        heads = rows[stored].reshape(-1, cache.kv_heads, cache.head_dim).to(dtype)
        if cache.scales is not None:
            is_float = cache.values.dtype == E4M3
            whole, scales = quantize_groups(heads.float(), is_float=is_float)
            cache.scales[block, side, :, token] = scales
            heads = whole
        cache.values[block, side, :, token] = heads.to(cache.values.dtype)


def _gather(
    cache: LayerCache, side: int, blocks: Tensor, token: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return positions in float32 [R, kv_heads, P, D], and their scales [R, kv_heads, P], from
    blocks and tokens in them [R, P]."""
    values = cache.values[blocks, side, :, token].float().transpose(1, 2).contiguous()
    if cache.scales is None:
        return values, None
    return values, cache.scales[blocks, side, :, token].transpose(1, 2).contiguous()


def attention(
    q: Tensor,
    cache: LayerCache,
    *,
    seq_starts: list[int],
    positions: list[int],
    block_tables: Tensor,
    heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> Tensor:
    """q [R, heads * D] over one layer's cache: [R, heads * D] in float32.

    Row r sees positions 0..positions[r] of its sequence (the last `window` of them, if not 0).
    """
    y = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # of rows past the last too
    for rows, own in rows_at_once(
        q,
        cache,
        seq_starts=seq_starts,
        positions=positions,
        block_tables=block_tables,
        heads=heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        dtype=dtype,
    ):
        merged = Part.nothing(own.q)
        for piece in own.pieces:
            merged = merged.merged(own.part(piece), own.sees(piece))
        y[rows] = merged.values().reshape(-1, q.shape[1])
    return y


def rows_at_once(
    q: Tensor,
    cache: LayerCache,
    *,
    seq_starts: list[int],
    positions: list[int],
    block_tables: Tensor,
    heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, RowHeads]]:
    """Yield some rows of a step at a time, with their heads. Arguments as those of `attention`."""
    sequences = [
        index for index, (start, end) in enumerate(pairwise(seq_starts)) for _ in range(start, end)
    ]
    at_once = num_at_once(q.shape[1])
    for first in range(0, len(sequences), at_once):
        rows = slice(first, min(first + at_once, len(sequences)))
        own_positions = torch.tensor(positions[rows])
        firsts = torch.zeros_like(own_positions)
        if window:
            firsts = (own_positions - window + 1).clamp(min=0)
        of_rows = (
            q[rows].float().reshape(-1, cache.kv_heads, heads // cache.kv_heads, cache.head_dim)
        )
        yield (
            rows,
            RowHeads(
                q=of_rows,
                cache=cache,
                tables=block_tables[sequences[rows]],
                positions=own_positions,
                firsts=firsts,
                scale=scale,
                soft_cap=soft_cap,
                dtype=dtype,
            ),
        )


def num_at_once(width: int) -> int:
    """Return how many rows of queries of a width are computed at once."""
    return max(_ELEMENTS_AT_ONCE // (width * PIECE_POSITIONS), 1)


@dataclass(frozen=True, slots=True)
class Part:
    """What some pieces give for heads: the largest score and the sum of the probabilities
    [R, kv_heads, heads of each, 1], and the weighted values [R, kv_heads, heads of each, D]."""

    highest: Tensor
    total: Tensor
    y: Tensor

    @classmethod
    def nothing(cls, q: Tensor) -> Part:
        """Return the part of no piece, for heads like those of q."""
        highest = torch.full((*q.shape[:-1], 1), -torch.inf)
        return cls(highest, torch.zeros_like(highest), torch.zeros_like(q))

    def merged(self, other: Part, some: Tensor) -> Part:
        """Return this part with that of the next piece, of the rows that see some of it [R]."""
        merged = torch.maximum(self.highest, other.highest)
        kept = plain_curves.exp(self.highest - merged)
        added = plain_curves.exp(other.highest - merged)
        where = some[:, None, None, None]
        return Part(
            torch.where(where, merged, self.highest),
            torch.where(where, self.total * kept + other.total * added, self.total),
            torch.where(where, self.y * kept + other.y * added, self.y),
        )

    def values(self) -> Tensor:
        """Return the values weighted by probabilities that add up to 1."""
        return self.y / self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHeads:
    """Heads of some rows, q [R, kv_heads, heads of each, D], and what they see: positions firsts to
    positions [R] of their sequences, by tables [R, columns]."""

    q: Tensor
    cache: LayerCache
    tables: Tensor
    positions: Tensor
    firsts: Tensor
    scale: float
    soft_cap: float
    dtype: torch.dtype

    @property
    def pieces(self) -> range:
        """The pieces that some row sees, by number."""
        first, last = int(self.firsts.min()), int(self.positions.max())
        return range(first // PIECE_POSITIONS, last // PIECE_POSITIONS + 1)

    def sees(self, piece: int) -> Tensor:
        """Return which rows see some of a piece [R]."""
        begin = piece * PIECE_POSITIONS
        return (self.firsts < begin + PIECE_POSITIONS) & (self.positions >= begin)

    def part(self, piece: int) -> Part:
        """Return what a piece gives; without meaning for rows that see nothing of it."""
        cache, begin = self.cache, piece * PIECE_POSITIONS
        at = torch.arange(begin, begin + _width(int(self.positions.max()) + 1 - begin))
        seen = (at >= self.firsts[:, None]) & (at <= self.positions[:, None])  # [R, P]
        seen_by_heads = seen[:, None, None]
        # What a row does not see reads the first block, and is left out of all sums.
        column = (at // cache.block_size).clamp(max=self.tables.shape[1] - 1)
        blocks = torch.where(seen, self.tables[:, column].long(), 0)
        token = (at % cache.block_size).expand(len(self.q), -1)
        k, k_scales = _gather(cache, 0, blocks, token)
        v, v_scales = _gather(cache, 1, blocks, token)
        # [R, kv_heads, heads of each, P]
        scores = plain_curves.sum_last(self.q[:, :, :, None] * k[:, :, None])
        if k_scales is not None:
            scores = scores * k_scales[:, :, None]
        scores = scores * self.scale
        if self.soft_cap:
            scores = self.soft_cap * plain_curves.tanh(scores / torch.tensor(self.soft_cap))
        scores = torch.where(seen_by_heads, scores, -torch.inf)
        highest = scores.amax(dim=-1, keepdim=True)
        weights = torch.where(seen_by_heads, plain_curves.exp(scores - highest), 0.0)
        total = plain_curves.sum_last(weights.clone())[..., None]
        if v_scales is not None:
            weights = weights * torch.where(seen[:, None], v_scales, 0.0)[:, :, None]
        v = torch.where(seen[:, None, :, None], v, 0.0).transpose(2, 3)
        weighted = weights.to(self.dtype).float()[:, :, :, None] * v[:, :, None]
        y = plain_curves.sum_last(weighted) + 0.0  # -0 as 0: sums end in any number of zeros
        return Part(highest, total, y)


def _width(num_positions: int) -> int:
    """Return positions of a piece that are computed: a power of two, so that sums by halves have
    the order of a whole piece, of which the rest is zeros."""
    width = _MIN_POSITIONS
    while width < min(num_positions, PIECE_POSITIONS):
        width *= 2
    return width
