"""ContextSteps: attention by kernels over a cache of which several ranks have the pieces by turns.

Each rank computes the parts of its own pieces for all heads, as tiles that are cut at every piece;
the ranks exchange them (all_to_all), and each merges those of its own heads in the order of
positions (kernels/context_merge.py). As plain_context.py, with some tiles at a time, so that parts
fit the room that is counted. Knows the cache's shape and the exchange of a stage. Always holds:
ranks plan the same tiles from the same batch, so that they exchange parts of as many; a part has
the bits that one process computes for it. Its steps are not captured: how many pieces a row has is
part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execute.gpu.exchange import TensorExchange
from quire.execute.gpu.kernels.attention import (
    DeviceTiles,
    Partials,
    attention,
    narrow_rows,
    wide_rows,
)
from quire.execute.gpu.kernels.attention_plan import ITEM_FIELDS, PIECE_POSITIONS, plan_tiles
from quire.execute.gpu.kernels.context_merge import NUMBERS, merge_ranks
from quire.execute.gpu.place import Place
from quire.execute.gpu.rank_ops import exchange_of
from quire.execute.gpu.step_buffers import Counts
from quire.execute.gpu.stream import Stream
from quire.program.batch import ForwardBatch
from quire.program.comm_ops import share_of
from quire.program.ops import Attention
from quire.program.program import Program

Int32s = NDArray[np.int32]
# Of the parts of a rank that are computed at once; four times as much is in use.
PARTS_BYTES = 32 * 2**20
_COPIES = 4  # as kernels leave them, by heads, given and taken


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What parts depend on. rows: of a tile. is_narrow: whether tiles have one token."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    is_narrow: bool

    @property
    def tokens(self) -> int:
        """Of a tile, at most."""
        return 1 if self.is_narrow else self.rows // (self.heads // self.kv_heads)

    @property
    def slot_bytes(self) -> int:
        """Of a tile's part of one piece."""
        return self.heads * self.tokens * (self.head_dim + NUMBERS) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Some tiles on the device: this rank's items and all merges; slots of parts."""

    items: Tensor
    merges: Tensor
    slots: int


class ContextSteps:
    """The attention of a program's steps. exact: as in AttentionSteps."""

    def __init__(self, place: Place, stream: Stream, *, exact: bool) -> None:
        self._place, self._stream, self._exact = place, stream, exact
        self._batch: ForwardBatch | None = None  # what the plans are of
        self._plans: dict[_Shape, Sequence[_Tiles]] = {}

    def attend(self, op: Attention, counts: Counts) -> None:
        """Compute an operation over the pieces of all ranks."""
        if self._batch is not counts.batch:
            self._batch = counts.batch
            self._plans.clear()
        exchange = exchange_of(op, self._place.ends)
        for shape in shapes_of(op, self._place.program, exact=self._exact):
            if shape not in self._plans:
                self._plans[shape] = list(self._planned(op, shape, counts.batch))
            for tiles in self._plans[shape]:
                self._some(op, shape, tiles, exchange, counts)

    def _some(
        self, op: Attention, shape: _Shape, tiles: _Tiles, exchange: TensorExchange, counts: Counts
    ) -> None:
        place, step = self._place, self._place.step
        y, q = place.of(op.y, counts), place.of(op.q, counts)
        group = shape.heads // shape.kv_heads
        partials = Partials.empty(
            tiles.slots,
            kv_heads=shape.kv_heads,
            rows=shape.tokens * group,
            head_dim=shape.head_dim,
            device=q.device,
        )
        attention(
            q,
            place.pool().layer(op.layer),
            q,  # of items of whole tiles, of which there are none
            tiles=DeviceTiles(
                rows=shape.rows, items=tiles.items, merges=tiles.merges[:0], partials=partials
            ),
            positions=step.positions[: counts.tokens],
            tables=step.block_tables,
            scale=op.scale,
            window=op.window,
            soft_cap=op.soft_cap,
        )
        parts = _by_heads(partials, shape)
        shares = [share_of(op.heads, 1, rank, op.degree) for rank in range(op.degree)]
        widest, first = max(end - start for start, end in shares), exchange.rank - op.rank
        given = parts.new_empty((exchange.degree, widest, *parts.shape[1:]))
        for part, (start, end) in zip(given[first:], shares, strict=False):
            part[: end - start] = parts[start:end]
        taken = torch.empty_like(given)
        exchange.all_to_all(given, taken)
        start, end = shares[op.rank]
        merge_ranks(
            taken[first : first + op.degree],
            tiles.merges,
            step.positions[: counts.tokens],
            y,
            heads=end - start,
            window=op.window,
        )

    def _planned(self, op: Attention, shape: _Shape, batch: ForwardBatch) -> Iterator[_Tiles]:
        tokens = np.diff(batch.seq_starts)
        at = np.minimum(batch.seq_starts[:-1], max(len(batch.positions) - 1, 0))
        plan = plan_tiles(
            batch.seq_starts,
            batch.positions[at],
            np.flatnonzero((tokens == 1) if shape.is_narrow else (tokens > 1)),
            group=op.heads // op.kv_heads,
            rows=shape.rows,
            kv_heads=op.kv_heads,
            programs=0,
            max_partials=0,
        )
        rounds = -(-plan.items[:, 4] // op.degree)
        room = max_slots(shape, self._place.program, op.degree)
        for first, end in _runs(rounds, room):
            items, merges = tiles_of_rank(
                plan.items[first:end], rounds[first:end], rank=op.rank, degree=op.degree
            )
            yield _Tiles(
                items=self._stream.to_device(items),
                merges=self._stream.to_device(merges),
                slots=int(rounds[first:end].sum()),
            )


def shapes_of(op: Attention, program: Program, *, exact: bool) -> list[_Shape]:
    """Return the shapes of tiles of one token, and of several."""
    group, itemsize = op.heads // op.kv_heads, program.caches[op.cache].dtype.itemsize
    narrow = narrow_rows(group, is_exact=exact, itemsize=itemsize)
    wide = wide_rows(group, op.head_dim, itemsize=itemsize)
    return [
        _Shape(
            heads=op.heads,
            kv_heads=op.kv_heads,
            head_dim=op.head_dim,
            rows=rows,
            is_narrow=is_narrow,
        )
        for rows, is_narrow in ((narrow, True), (wide, False))
    ]


def tiles_of_rank(
    items: Int32s, rounds: Int32s, *, rank: int, degree: int
) -> tuple[Int32s, Int32s]:
    """Return the items of a rank's pieces, one each, and the merges of all rows of some tiles.

    items: as plan_tiles gives them, uncut. rounds: pieces of each tile for each rank, at most: its
    slots of parts, which follow those of the tile before.
    """
    slots = np.cumsum(rounds) - rounds
    cut, merges = [], []
    for (sequence, row, count, _, end, _), slot in zip(items.tolist(), slots.tolist(), strict=True):
        for piece in range(rank, end, degree):
            cut.append((sequence, row, count, piece, piece + 1, slot + piece // degree))
        merges += [(row + place, slot, place) for place in range(count)]
    return (
        np.array(cut, np.int32).reshape(-1, ITEM_FIELDS),
        np.array(merges, np.int32).reshape(-1, 3),
    )


def max_slots(shape: _Shape, program: Program, degree: int) -> int:
    """Return how many slots of parts are computed at once: those of one tile at least."""
    pieces = -(-program.max_positions // PIECE_POSITIONS)
    return max(PARTS_BYTES // shape.slot_bytes, -(-pieces // degree))


def context_bytes(program: Program, *, exact: bool) -> int:
    """Return the bytes of parts that are in use at once; 0 where ranks divide no positions."""
    return max(
        (
            _COPIES * max_slots(shape, program, op.degree) * shape.slot_bytes
            for op in program.operations()
            if isinstance(op, Attention) and op.degree > 1
            for shape in shapes_of(op, program, exact=exact)
        ),
        default=0,
    )


def _by_heads(partials: Partials, shape: _Shape) -> Tensor:
    """Return parts [heads, slots, tokens, D + 2], from those of rows that are tokens by heads of a
    KV head."""
    group = shape.heads // shape.kv_heads
    joined = torch.cat([partials.y, partials.sums], dim=-1)
    split = joined.view(len(joined), shape.kv_heads, shape.tokens, group, joined.shape[-1])
    by_heads = split.permute(1, 3, 0, 2, 4)
    return by_heads.reshape(shape.heads, len(joined), shape.tokens, joined.shape[-1])


def _runs(rounds: Int32s, room: int) -> Iterator[tuple[int, int]]:
    """Yield runs of tiles of which the slots fit the room together."""
    edges, used = [0], 0
    for at, count in enumerate(rounds.tolist()):
        if used + count > room and used:
            edges.append(at)
            used = 0
        used += count
    yield from pairwise([*edges, len(rounds)] if len(rounds) else [])
