"""Store keys and values, and attend to them, in plain PyTorch: piece by piece, by sums and curves
of which a head's bits depend on that head alone (plain_curves.py).

The recipe is quire/execute/reference_attention.py's: pieces of 256 positions aligned to absolute
position, merged in order, probabilities rounded to the cache's dtype before the product with V.
Knows one layer of a cache (kernels/cache_layout.py). Letters: R rows, P positions of a piece.
"""

from __future__ import annotations

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
    """Positions in float32 [R, kv_heads, P, D], and their scales [R, kv_heads, P], from blocks and
    tokens in them [R, P]."""
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
    sequences = [
        index for index, (start, end) in enumerate(pairwise(seq_starts)) for _ in range(start, end)
    ]
    y = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # of rows past the last too
    at_once = max(_ELEMENTS_AT_ONCE // (q.shape[1] * PIECE_POSITIONS), 1)
    for first in range(0, len(sequences), at_once):
        rows = slice(first, min(first + at_once, len(sequences)))
        y[rows] = _attend(
            q[rows].float().reshape(-1, heads, cache.head_dim),
            cache,
            block_tables[sequences[rows]],
            torch.tensor(positions[rows]),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            dtype=dtype,
        ).reshape(-1, q.shape[1])
    return y


def _attend(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> Tensor:
    """Rows' heads [R, heads, D] over their sequences, piece by piece."""
    grouped = q.reshape(len(q), cache.kv_heads, -1, q.shape[2])  # [R, kv_heads, heads of each, D]
    firsts = (positions - window + 1).clamp(min=0) if window else torch.zeros_like(positions)
    begin = int(firsts.min()) // PIECE_POSITIONS * PIECE_POSITIONS
    last = int(positions.max())
    maximum = torch.full((*grouped.shape[:3], 1), -torch.inf)
    total, y = torch.zeros_like(maximum), torch.zeros_like(grouped)
    for piece in range(begin, last + 1, PIECE_POSITIONS):
        at = torch.arange(piece, piece + _width(last + 1 - piece))
        seen = (at >= firsts[:, None]) & (at <= positions[:, None])  # [R, P]
        seen_by_heads = seen[:, None, None]
        # What a row does not see reads the first block, and is left out of all sums.
        column = (at // cache.block_size).clamp(max=tables.shape[1] - 1)
        blocks = torch.where(seen, tables[:, column].long(), 0)
        token = (at % cache.block_size).expand(len(q), -1)
        k, k_scales = _gather(cache, 0, blocks, token)
        v, v_scales = _gather(cache, 1, blocks, token)
        # [R, kv_heads, heads of each, P]
        scores = plain_curves.sum_last(grouped[:, :, :, None] * k[:, :, None])
        if k_scales is not None:
            scores = scores * k_scales[:, :, None]
        scores = scores * scale
        if soft_cap:
            scores = soft_cap * plain_curves.tanh(scores / torch.tensor(soft_cap))
        scores = torch.where(seen_by_heads, scores, -torch.inf)
        highest = scores.amax(dim=-1, keepdim=True)
        weights = torch.where(seen_by_heads, plain_curves.exp(scores - highest), 0.0)
        piece_total = plain_curves.sum_last(weights.clone())[..., None]
        if v_scales is not None:
            weights = weights * torch.where(seen[:, None], v_scales, 0.0)[:, :, None]
        v = torch.where(seen[:, None, :, None], v, 0.0).transpose(2, 3)
        weighted = weights.to(dtype).float()[:, :, :, None] * v[:, :, None]
        piece_y = plain_curves.sum_last(weighted) + 0.0  # -0 as 0: sums end in any number of zeros

        merged = torch.maximum(maximum, highest)
        kept, added = plain_curves.exp(maximum - merged), plain_curves.exp(highest - merged)
        some = seen.any(dim=1)[:, None, None, None]
        total = torch.where(some, total * kept + piece_total * added, total)
        y = torch.where(some, y * kept + piece_y * added, y)
        maximum = torch.where(some, merged, maximum)
    return (y / total).reshape(q.shape)


def _width(num_positions: int) -> int:
    """Positions of a piece that are computed: a power of two, so that sums by halves have the order
    of a whole piece, of which the rest is zeros."""
    width = _MIN_POSITIONS
    while width < min(num_positions, PIECE_POSITIONS):
        width *= 2
    return width
