"""Store keys and values, and attend to them, in plain PyTorch: a row at a time, piece by piece, by
sums and curves whose bits depend on a head alone (plain_curves.py).

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
    cache: LayerCache, side: int, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rows at `positions` in float32 [kv_heads, P, D], and their scales [kv_heads, P]."""
    block, token = table[positions // cache.block_size].long(), positions % cache.block_size
    values = cache.values[block, side, :, token].float().transpose(0, 1).contiguous()
    if cache.scales is None:
        return values, None
    return values, cache.scales[block, side, :, token].transpose(0, 1).contiguous()


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
    y = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for sequence, (start, end) in enumerate(pairwise(seq_starts)):
        for row in range(start, end):
            y[row] = _attend(
                q[row].float().reshape(heads, -1).clone(),
                cache,
                block_tables[sequence],
                positions[row],
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                dtype=dtype,
            ).reshape(-1)
    return y


def _attend(
    q: Tensor,
    cache: LayerCache,
    table: Tensor,
    position: int,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> Tensor:
    """One row's heads [heads, D] over its sequence."""
    grouped = q.reshape(cache.kv_heads, -1, q.shape[1])  # [kv_heads, heads of each, D]
    first = max(0, position - window + 1) if window else 0
    maximum = torch.full((*grouped.shape[:2], 1), -torch.inf)
    total, y = torch.zeros_like(maximum), torch.zeros_like(grouped)
    for piece in range(first - first % PIECE_POSITIONS, position + 1, PIECE_POSITIONS):
        end = min(piece + PIECE_POSITIONS, position + 1)
        seen = torch.arange(max(piece, first), end)
        k, k_scales = _gather(cache, 0, table, seen)
        v, v_scales = _gather(cache, 1, table, seen)
        # [kv_heads, heads of each, P]
        scores = plain_curves.sum_last(grouped[:, :, None] * k[:, None])
        if k_scales is not None:
            scores = scores * k_scales[:, None]
        scores = scores * scale
        if soft_cap:
            scores = soft_cap * plain_curves.tanh(scores / torch.tensor(soft_cap))
        highest = scores.amax(dim=-1, keepdim=True)
        weights = plain_curves.exp(scores - highest)
        piece_total = plain_curves.sum_last(weights.clone())[..., None]
        if v_scales is not None:
            weights = weights * v_scales[:, None]
        weighted = weights.to(dtype).float()[:, :, None] * v.transpose(1, 2)[:, None]
        piece_y = plain_curves.sum_last(weighted)
        if piece <= first:  # the first one
            maximum, total, y = highest, piece_total, piece_y
            continue
        merged = torch.maximum(maximum, highest)
        kept, added = plain_curves.exp(maximum - merged), plain_curves.exp(highest - merged)
        total = total * kept + piece_total * added
        y = y * kept + piece_y * added
        maximum = merged
    return y / total
