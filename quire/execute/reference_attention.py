"""Causal attention over a paged cache, the plain twin of the native one: a row at a time.

The recipe: positions are taken in pieces of 256, aligned to absolute position (under a window
too); in each piece scores, their maximum, exp(score - maximum), the sum of those in float32 and
the product with V; then pieces are merged in order. Probabilities are rounded to the cache's
dtype before the product with V, as named in the operations' contract. In a cache of integers, or of
fp8, a head's key or value is small numbers times a scale of its own: a score is multiplied by its
key's scale, a probability by its value's before it is rounded, and the sum is of those without.
Knows no sequences beyond their rows and tables. Letters: T rows, S sequences, D head_dim, P
positions of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quire.program.declarations import FP8_CACHE, PIECE_POSITIONS
from quire.program.tensors import DType
from quire.quant.fp8 import LARGEST, e4m3
from quire.quant.int_rows import scale_and_inverse
from quire.weights.dtypes import round_to_bf16

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Keys, or values, of one layer: [blocks, block_size, kv_heads, D], and what each head's row
    of them is multiplied by [blocks, block_size, kv_heads]: 1 where they have no scheme. (Or of all
    layers, one more axis before.)"""

    values: Float32s
    scales: Float32s

    @classmethod
    def zeros(cls, *shape: int) -> PagedRows:
        """Return all zeros, [..., kv_heads, D]."""
        return cls(np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.values.nbytes + self.scales.nbytes

    def layer(self, index: int) -> PagedRows:
        """Return one layer of all, a view."""
        return PagedRows(self.values[index], self.scales[index])

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over all layers."""
        self.values[:, target] = self.values[:, source]
        self.scales[:, target] = self.scales[:, source]

    def store(self, rows: Float32s, kv_slots: Int32s, dtype: DType, scheme: str) -> None:
        """Write rows [R, kv_heads * D] at slots, -1 nowhere."""
        blocks, block_size, kv_heads, head_dim = self.values.shape
        stored = kv_slots >= 0
        heads = rows[stored].reshape(-1, kv_heads, head_dim)
        if dtype is DType.BF16:
            heads = round_to_bf16(heads)
        scales = np.ones(heads.shape[:2], np.float32)
        if scheme:
            heads, scales = quantize_heads(heads, scheme)
        slots = kv_slots[stored]
        self.values.reshape(blocks * block_size, kv_heads, head_dim)[slots] = heads
        self.scales.reshape(blocks * block_size, kv_heads)[slots] = scales


def quantize_heads(heads: Float32s, scheme: str) -> tuple[Float32s, Float32s]:
    """Return rows [R, kv_heads, D] as whole numbers from -127 to 127, or as fp8 has them, and the
    scale of each; zeros, with the scale NaN, where one is not finite."""
    steps = float(LARGEST) if scheme == FP8_CACHE else 127.0
    scales, inverse = scale_and_inverse(np.abs(heads).max(axis=-1), steps)
    finite = np.where(np.isfinite(scales)[..., None], heads, np.float32(0))
    scaled = finite * inverse[..., None]
    return (e4m3(scaled) if scheme == FP8_CACHE else np.rint(scaled)), scales


def attention(
    q: Float32s,
    keys: PagedRows,
    values: PagedRows,
    *,
    seq_starts: Int32s,
    positions: Int32s,
    block_tables: Int32s,
    heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    dtype: DType,
) -> Float32s:
    """q [T, heads * D] over one layer's cache: [T, heads * D].

    Row t sees positions 0..positions[t] of its sequence (the last `window` of them, if not 0).
    """
    y = np.empty(q.shape, np.float32)
    for sequence, (start, end) in enumerate(pairwise(seq_starts)):
        last = int(positions[start:end].max(initial=0))
        cached = SequenceRows(keys, values, block_tables[sequence], heads=heads, end=last + 1)
        for row in range(start, end):
            y[row] = _attend_row(
                q[row].reshape(heads, -1),
                cached,
                int(positions[row]),
                scale=np.float32(scale),
                window=window,
                soft_cap=np.float32(soft_cap),
                dtype=dtype,
            ).reshape(-1)
    return y


def _attend_row(
    q: Float32s,
    cached: SequenceRows,
    position: int,
    *,
    scale: np.float32,
    window: int,
    soft_cap: np.float32,
    dtype: DType,
) -> Float32s:
    """Return one row's heads [heads, D] over its sequence."""
    merged: Part | None = None
    for _, seen in pieces_seen(position, window):
        part = part_of_piece(q, cached, seen, scale=scale, soft_cap=soft_cap, dtype=dtype)
        merged = part if merged is None else merged.merged(part)
    assert merged is not None, "a row sees its own position"
    return merged.y / merged.total


class SequenceRows:
    """Keys and values of one sequence, gathered by piece once for all rows of a step that see it.

    heads: of the queries, which share the cache's. end: no row sees a position from here on.
    """

    def __init__(
        self, keys: PagedRows, values: PagedRows, table: Int32s, *, heads: int, end: int
    ) -> None:
        self._arrays = (keys.values, values.values, keys.scales, values.scales)
        self._table, self._heads, self._end = table, heads, end
        self._pieces: dict[int, tuple[int, list[Float32s]]] = {}

    def at(self, seen: NDArray[np.int64]) -> list[Float32s]:
        """Return keys and values [heads, P, D] and their scales [heads, P] at positions of one
        piece.
        """
        piece, first = int(seen[0]) // PIECE_POSITIONS, int(seen[0])
        kept = self._pieces.get(piece)
        if kept is None or first < kept[0]:
            end = min((piece + 1) * PIECE_POSITIONS, self._end)
            kept = self._pieces[piece] = first, self._gather(np.arange(first, end))
        begin = first - kept[0]
        return [array[:, begin : begin + len(seen)] for array in kept[1]]

    def _gather(self, positions: NDArray[np.int64]) -> list[Float32s]:
        """Return [heads, P, ...] of each array, repeated for the heads that share them."""
        block_size, kv_heads = self._arrays[0].shape[1:3]
        slots = self._table[positions // block_size], positions % block_size
        group = self._heads // kv_heads
        return [array[slots].swapaxes(0, 1).repeat(group, axis=0) for array in self._arrays]


def pieces_seen(position: int, window: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the pieces that a row sees, by number, each with the positions it sees of it."""
    first = max(0, position - window + 1) if window else 0
    for piece in range(first // PIECE_POSITIONS, position // PIECE_POSITIONS + 1):
        start = piece * PIECE_POSITIONS
        yield piece, np.arange(max(start, first), min(start + PIECE_POSITIONS, position + 1))


@dataclass(frozen=True, slots=True)
class Part:
    """What some pieces give for the heads of a row: the largest score [heads, 1], the sum of the
    probabilities, and the weighted values [heads, D]."""

    highest: Float32s
    total: Float32s
    y: Float32s

    def merged(self, other: Part) -> Part:
        """Return this part with that of the next piece."""
        highest = np.maximum(self.highest, other.highest)
        kept, added = np.exp(self.highest - highest), np.exp(other.highest - highest)
        total = self.total * kept + other.total * added
        return Part(highest, total, self.y * kept + other.y * added)


def part_of_piece(
    q: Float32s,
    cached: SequenceRows,
    seen: NDArray[np.int64],
    *,
    scale: np.float32,
    soft_cap: np.float32,
    dtype: DType,
) -> Part:
    """Return the part of a row's heads [heads, D] over the positions `seen` of one piece."""
    keys, values, key_scales, value_scales = cached.at(seen)
    scores = np.matmul(keys, q[:, :, None])[:, :, 0]  # [heads, P]
    scores = scores * key_scales * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    highest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=1, keepdims=True)
    weights = weights * value_scales
    if dtype is DType.BF16:
        weights = round_to_bf16(weights)
    return Part(highest, total, np.matmul(weights[:, None, :], values)[:, 0, :])
