"""A paged KV cache on CPU tensors, sequences in it, and float64 attention to compare with.

Blocks are shuffled. Slots without content hold NaN, and unused table columns name a block that does
not exist. Letters: T rows, S sequences, D head_dim, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.execute.gpu.kernels import attention_plan as plans
from quire.execute.gpu.kernels.attention import DeviceTiles, Partials, attention
from quire.execute.gpu.kernels.cache_layout import SCALED, CachePool

NOWHERE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Parameters of an attention operation."""

    precision: str = "bf16"
    query: str = "bf16"
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.query == "bf16" else torch.float32


@dataclass
class World:
    """`lengths` cached positions of each sequence, with a query for each position."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    layer: int = 1
    queries: list[torch.Tensor] = field(default_factory=list)  # [P, heads * D] of each sequence

    def __post_init__(self) -> None:
        shape, draw = self.shape, np.random.default_rng(self.seed)
        counts = [-(-length // shape.block_size) for length in self.lengths]
        order = draw.permutation(sum(counts) + 2)
        self.tables = np.full((len(counts), max(counts) + 1), NOWHERE, np.int32)
        first = 0
        for sequence, count in enumerate(counts):
            self.tables[sequence, :count] = order[first : first + count]
            first += count
        self.pool = CachePool.zeros(
            shape.precision,
            layers=2,
            blocks=len(order),
            kv_heads=shape.kv_heads,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            device="cpu",
        )
        self.poison()
        self.sinks = torch.from_numpy(draw.standard_normal(shape.heads).astype(np.float32))
        for sequence, length in enumerate(self.lengths):
            rows = torch.from_numpy(draw.standard_normal((length, shape.heads * shape.head_dim)))
            self.queries.append(rows.to(shape.dtype))
            for position in range(length):
                self.fill(sequence, position, draw)

    def poison(self) -> None:
        """Fill a cache tensor with NaN, which marks memory that was never written."""
        if self.pool.scales is not None:
            self.pool.scales.fill_(np.nan)
            self.pool.values.copy_(torch.full(self.pool.values.shape, 77.0))
        else:
            self.pool.values.fill_(np.nan)

    def at(self, sequence: int, position: int) -> tuple[int, int]:
        """Return the block and the offset in it of a position."""
        size = self.shape.block_size
        return int(self.tables[sequence, position // size]), position % size

    def fill(self, sequence: int, position: int, draw: np.random.Generator) -> None:
        """Write random keys and values at a position of all KV heads."""
        block, place = self.at(sequence, position)
        shape = self.shape
        rows = draw.standard_normal((2, shape.kv_heads, shape.head_dim))
        if shape.precision == "int8":
            rows = np.rint(rows * 40)
        if shape.precision in SCALED:
            scales = draw.uniform(0.01, 0.04, (2, shape.kv_heads))
            self.pool.scales[self.layer, block, :, :, place] = torch.from_numpy(scales).float()
            rows = rows if shape.precision == "int8" else rows * 40
        self.pool.values[self.layer, block, :, :, place] = torch.from_numpy(rows).to(
            self.pool.values.dtype
        )

    def held(self, sequence: int, positions: np.ndarray) -> np.ndarray:
        """Return keys and values as the cache holds them, [2, P, kv_heads, D] in float64."""
        found = []
        for position in positions:
            block, place = self.at(sequence, int(position))
            rows = self.pool.values[self.layer, block, :, :, place].to(torch.float64)
            if self.pool.scales is not None:
                rows = rows * self.pool.scales[self.layer, block, :, :, place, None]
            found.append(rows.numpy())
        return np.stack(found, axis=1)

    def expected(self, sequence: int, position: int) -> np.ndarray:
        """Return one row [heads, D]: plain softmax over all visible positions."""
        shape = self.shape
        first = max(0, position - shape.window + 1) if shape.window else 0
        held = self.held(sequence, np.arange(first, position + 1))
        keys, values = np.repeat(held, shape.group, axis=2)
        q = self.queries[sequence][position].to(torch.float64).numpy()
        q = q.reshape(shape.heads, shape.head_dim)
        scores = np.einsum("hd,phd->hp", q, keys) * shape.head_dim**-0.5
        if shape.soft_cap:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        if shape.has_sinks:
            scores = np.concatenate([scores, self.sinks.numpy()[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("hp,phd->hd", weights[:, : held.shape[1]], values)

    def run(
        self,
        spans: Sequence[tuple[int, int, int]],
        *,
        rows: int,
        programs: int = 0,
        max_partials: int = 1_000,
        idle: int = 0,
    ) -> torch.Tensor:
        """Run rows [T, heads, D] of spans (sequence, first position, end position) in one launch.

        programs > 0 splits tiles into work items; idle adds work items and merges without work.
        """
        shape = self.shape
        seq_starts = np.cumsum([0, *(end - first for _, first, end in spans)]).astype(np.int32)
        firsts = np.array([first for _, first, _ in spans], np.int32)
        plan = plans.plan_tiles(
            seq_starts,
            firsts,
            np.arange(len(spans)),
            group=shape.group,
            rows=rows,
            kv_heads=shape.kv_heads,
            programs=programs,
            max_partials=max_partials,
        )
        if idle:
            plan = plans.padded(plan, items=len(plan.items) + idle, merges=len(plan.merges) + idle)
        partials = None
        if programs:
            partials = Partials.empty(
                plan.num_partials + 1,
                kv_heads=shape.kv_heads,
                rows=min(rows, shape.group * max(end - first for _, first, end in spans)),
                head_dim=shape.head_dim,
                device="cpu",
            )
            partials.y.fill_(np.nan)
            partials.sums.fill_(np.nan)
        positions = np.concatenate([np.arange(first, end) for _, first, end in spans])
        width = shape.heads * shape.head_dim
        # Queries and results are columns of wider buffers; the other columns hold NaN.
        buffer = torch.full((len(positions), width + 24), np.nan, dtype=shape.dtype)
        q = buffer[:, 8 : 8 + width]
        q.copy_(torch.cat([self.queries[s][first:end] for s, first, end in spans]))
        out = torch.full((len(positions), width + 8), np.nan, dtype=shape.dtype)
        attention(
            q,
            self.pool.layer(self.layer),
            out[:, :width],
            tiles=DeviceTiles(
                rows=rows,
                items=torch.from_numpy(plan.items),
                merges=torch.from_numpy(plan.merges),
                partials=partials,
            ),
            positions=torch.from_numpy(positions.astype(np.int32)),
            tables=torch.from_numpy(self.tables[[s for s, _, _ in spans]]),
            scale=shape.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=self.sinks if shape.has_sinks else None,
        )
        assert torch.isnan(out[:, width:]).all()
        return out[:, :width].reshape(-1, shape.heads, shape.head_dim)
