"""A paged KV cache and its two native operations, for the attention tests.

Holds keys, values and queries of whole sequences; a test stores and attends any rows. Unfilled
slots hold NaN. Blocks are shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.execute.reference_attention import PagedRows, attention
from quire.program.declarations import INT8_CACHE
from quire.program.tensors import DType
from quire.weights.dtypes import bf16_bits, round_to_bf16

Floats = NDArray[np.float32]
TOKENS = 0  # the row count of a buffer
BF16_NAN = bf16_bits(np.full((1, 1), np.nan, np.float32))[0, 0]
Batch = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class Kept(StrEnum):
    """The dtype of attention products, and the storage of keys and values."""

    F32 = "f32"
    BF16 = "bf16"
    INT8_IN_F32 = "int8 in f32"
    INT8_IN_BF16 = "int8 in bf16"

    @property
    def dtype(self) -> DType:
        """The dtype of queries, keys and values."""
        return DType.BF16 if self.value.endswith("bf16") else DType.F32

    @property
    def scheme(self) -> str:
        """The scheme of the cache."""
        return INT8_CACHE if self.value.startswith("int8") else ""

    @property
    def itemsize(self) -> int:
        """Bytes per element of the cache."""
        return 1 if self.scheme else self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The parameters of an attention operation."""

    kept: Kept = Kept.F32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 0
    soft_cap: float = 0.0

    @property
    def dtype(self) -> DType:
        """The dtype of queries, keys and values."""
        return self.kept.dtype

    @property
    def scale(self) -> float:
        """The usual softmax scale."""
        return float(np.float32(self.head_dim**-0.5))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a call: positions first .. first + count - 1 of a sequence."""

    sequence: int
    first: int
    count: int


@lru_cache(maxsize=8)  # drawn again for each instruction set, dtype and window otherwise
def _drawn(
    seed: int, shape: tuple[int, int], heads: int, kv_heads: int, head_dim: int
) -> tuple[Floats, ...]:
    """Draw q, k, v. Callers copy them."""
    draw = np.random.default_rng(seed)
    return tuple(
        (draw.standard_normal((*shape, num_heads, head_dim)) * spread).astype(np.float32)
        for num_heads, spread in ((heads, 2.0), (kv_heads, 1.0), (kv_heads, 1.0))
    )


class Tokens:
    """Random q, k, v [sequences, positions, heads, head_dim], rounded to the cache's dtype."""

    def __init__(
        self, geometry: Geometry, *, sequences: int, positions: int, seed: int = 0
    ) -> None:
        self.geometry = geometry
        drawn = _drawn(
            seed, (sequences, positions), geometry.heads, geometry.kv_heads, geometry.head_dim
        )
        is_bf16 = geometry.dtype is DType.BF16
        self.q, self.k, self.v = (
            round_to_bf16(values) if is_bf16 else values.copy() for values in drawn
        )


class PagedCache:
    """One layer of native cache for `tokens`, all NaN until stored."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        block_size: int = 16,
        num_threads: int = 1,
        isa: str = "",
        seed: int = 1,
    ) -> None:
        self.tokens, self.geometry, self.block_size = tokens, tokens.geometry, block_size
        sequences, positions = tokens.k.shape[:2]
        columns = -(-positions // block_size)
        order = np.random.default_rng(seed).permutation(sequences * columns + 3)
        self.tables = order[: sequences * columns].reshape(sequences, columns).astype(np.int32)
        geometry = self.geometry
        q_width = geometry.heads * geometry.head_dim
        kv_width = geometry.kv_heads * geometry.head_dim
        self._pool = _native.Pool(num_threads, isa=isa)
        widths = (q_width, kv_width, kv_width, q_width)
        self._stride = max(widths) + 7  # wider than any view: the other columns of a row are NaN
        max_rows = max(sequences * positions, 1)
        dtypes = (*[str(geometry.dtype)] * 3, "f32")
        offsets = np.cumsum([0, *[-(-max_rows * self._stride * 4 // 64) * 64] * 4])
        self._program = _native.Program(self._pool, int(offsets[-1]))
        for offset, dtype in zip(offsets, dtypes, strict=False):
            self._program.add_buffer(
                rows=TOKENS,
                offset_bytes=int(offset),
                stride=self._stride,
                max_rows=max_rows,
                dtype=dtype,
            )
        q, k, v, y = self._views = [(index, 3, width) for index, width in enumerate(widths)]
        attended = {
            "q": q,
            "y": y,
            "layer": 0,
            "heads": geometry.heads,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "scale": geometry.scale,
            "window": geometry.window,
            "soft_cap": geometry.soft_cap,
            "cache": 0,
            "rank": 0,
            "degree": 1,
        }
        self._program.add_segment([("store_kv", {"k": k, "v": v, "layer": 0, "cache": 0})])
        self._program.add_segment([("attention", attended)])
        self._program.allocate_cache(
            dtype=str(geometry.dtype),
            ints=bool(geometry.kept.scheme),
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            block_size=block_size,
            layers=1,
            num_blocks=len(order),
        )
        self.bytes = self._program.cache
        self.bytes[:] = 0xFF  # NaN in either dtype, and as a scale

    def share(self, positions: int, sequences: Sequence[int]) -> None:
        """Let sequences share the first one's blocks and tokens up to `positions`."""
        first, columns = sequences[0], positions // self.block_size
        for other in sequences[1:]:
            self.tables[other, :columns] = self.tables[first, :columns]
            for values in (self.tokens.k, self.tokens.v):
                values[other, :positions] = values[first, :positions]

    def store(self, calls: Sequence[Rows]) -> None:
        """Write keys and values of these rows."""
        self._write(1, np.concatenate([self._take(self.tokens.k, call) for call in calls]))
        self._write(2, np.concatenate([self._take(self.tokens.v, call) for call in calls]))
        self._run(0, self._batch(calls), self._slots(calls))

    def attend(self, calls: Sequence[Rows]) -> Floats:
        """Attention of these rows in one call: [rows, heads, head_dim]."""
        batch = self._batch(calls)
        positions, _, _ = batch
        self._write(0, np.concatenate([self._take(self.tokens.q, call) for call in calls]))
        self._run(1, batch, np.full(len(positions), -1, np.int32))
        y = self._program.array(self._views[3], len(positions)).copy()
        return y.reshape(len(positions), self.geometry.heads, self.geometry.head_dim)

    def attend_alone(self, calls: Sequence[Rows]) -> Floats:
        """Attend the same rows with one call each."""
        rows = [
            self.attend([Rows(call.sequence, call.first + i, 1)])
            for call in calls
            for i in range(call.count)
        ]
        return np.concatenate(rows)

    def pieces_read(self, calls: Sequence[Rows]) -> int:
        """Count the pieces of 256 positions that one such call reads, per KV head."""
        before = self._program.pieces_read
        self.attend(calls)
        return (self._program.pieces_read - before) // self.geometry.kv_heads

    def reference(self, calls: Sequence[Rows]) -> Floats:
        """Compute the same by the NumPy reference, from a plain cache."""
        geometry = self.geometry
        shape = (int(self.tables.max()) + 1, self.block_size, *self.tokens.k.shape[2:])
        cache_k, cache_v = PagedRows.zeros(*shape), PagedRows.zeros(*shape)
        every = [Rows(i, 0, self.tokens.k.shape[1]) for i in range(len(self.tables))]
        for cache, source in ((cache_k, self.tokens.k), (cache_v, self.tokens.v)):
            cache.values[:], cache.scales[:] = np.nan, np.nan
            rows = np.concatenate([self._take(source, call) for call in every])
            cache.store(rows, self._slots(every), geometry.dtype, geometry.kept.scheme)
        positions, starts, tables = self._batch(calls)
        q = np.concatenate([self._take(self.tokens.q, call) for call in calls])
        y = attention(
            q,
            cache_k,
            cache_v,
            seq_starts=starts,
            positions=positions,
            block_tables=tables,
            heads=geometry.heads,
            scale=geometry.scale,
            window=geometry.window,
            soft_cap=geometry.soft_cap,
            dtype=geometry.dtype,
        )
        return y.reshape(len(positions), geometry.heads, geometry.head_dim)

    # ---- private

    def _batch(self, calls: Sequence[Rows]) -> Batch:
        """Return positions, the first row of each call and block tables."""
        positions = np.concatenate([np.arange(c.first, c.first + c.count) for c in calls])
        starts = np.cumsum([0, *(call.count for call in calls)])
        tables = self.tables[[call.sequence for call in calls]]
        return positions.astype(np.int32), starts.astype(np.int32), tables

    def _slots(self, calls: Sequence[Rows]) -> NDArray[np.int32]:
        slots = []
        for call in calls:
            positions = np.arange(call.first, call.first + call.count)
            blocks = self.tables[call.sequence, positions // self.block_size]
            slots.append(blocks * self.block_size + positions % self.block_size)
        return np.concatenate(slots).astype(np.int32)

    def _take(self, values: Floats, call: Rows) -> Floats:
        rows = values[call.sequence, call.first : call.first + call.count]
        return rows.reshape(call.count, rows.shape[1] * rows.shape[2])

    def _write(self, buffer: int, values: Floats) -> None:
        """Put rows into a buffer surrounded by NaN."""
        whole = self._program.array((buffer, 0, self._stride), len(values))
        bits = self.geometry.dtype is DType.BF16
        whole[:] = BF16_NAN if bits else np.nan
        _, offset, width = self._views[buffer]
        whole[:, offset : offset + width] = bf16_bits(values) if bits else values

    def _run(
        self,
        segment: int,
        batch: Batch,
        slots: NDArray[np.int32],
    ) -> None:
        positions, starts, tables = batch
        self._program.run(
            segment,
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            rope_positions=positions,
            kv_slots=slots,
            seq_starts=starts,
            block_tables=np.ascontiguousarray(tables),
            sample_rows=np.empty(0, np.int32),
        )
