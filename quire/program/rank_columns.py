"""RankColumns: which heads and columns of a program's buffers a rank has, decided before the
rewrite (shard.py) from what reads each result.

Knows no weights and no exchanges. Always holds: the columns of all ranks together are those of the
whole program; a buffer is narrowed only where all that reads it needs the rank's columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.program.comm_ops import share_of
from quire.program.declarations import CacheSpec
from quire.program.degrees import kv_span
from quire.program.expert_parallel import Span
from quire.program.ops import (
    Activation,
    Attention,
    Copy,
    Linear,
    Norm,
    Op,
    Rope,
    Scale,
    SoftCap,
    StoreKV,
)
from quire.program.program import Program
from quire.program.tensors import Buffer, View

# Rows of a panel of packed weights: shares of whole panels are computed without padding.
PANEL_ROWS = 32

Region = tuple[int, int, int]  # buffer, offset and width of a view


@dataclass(frozen=True, slots=True)
class Tile:
    """Columns of a narrowed buffer: `span` of them, counted in the whole buffer, from `first`."""

    span: Span
    first: int


class RankColumns:
    """The columns of rank `rank` of `degree`, of which `context` at a time have the same heads.

    heads: the rank's columns of each view that holds heads, counted within the view. tiles: of each
    narrowed buffer, which has room for the rank's columns only.
    """

    def __init__(self, program: Program, degree: int, rank: int, context: int) -> None:
        self._source, self._degree, self._rank = program, degree, rank
        self._context, self.tensor, self._place = context, degree // context, rank // context
        self.heads = self._own_heads()
        self.tiles = self._narrowed()
        self.buffers = tuple(self._buffer(buffer) for buffer in program.buffers)

    def unit(self, width: int) -> int | None:
        """Return the unit in which `width` columns are split; None: too few to be split."""
        if -(-width // PANEL_ROWS) >= self._degree:
            return PANEL_ROWS
        return 1 if width >= self._degree else None

    def share(self, width: int, unit: int) -> Span:
        """Return the rank's columns of `width`."""
        return share_of(width, unit, self._rank, self._degree)

    def kv_span(self, kv_heads: int) -> Span:
        """Return the rank's KV heads."""
        return kv_span(kv_heads, self._place, self.tensor)

    def cache(self, cache: CacheSpec) -> CacheSpec:
        """Return the rank's share of a cache."""
        first, end = self.kv_span(cache.kv_heads)
        return replace(cache, kv_heads=end - first, ranks=self._context)

    def is_of_heads(self, op: Op) -> bool:
        """Return whether an operation can compute the rank's heads only."""
        views = (*op.inputs, *op.outputs)
        can = _keeps_heads(op) or isinstance(op, StoreKV)
        return can and all(region(view) in self.heads for view in views)

    def over(self, view: View) -> View:
        """Return the view on the rank's buffer: all of a narrowed one, else the same columns."""
        buffer = self.buffers[view.buffer.index]
        if view.buffer.index in self.tiles:
            return View(buffer, 0, buffer.width)
        return replace(view, buffer=buffer)

    def tile_view(self, view: View, span: Span) -> View:
        """Return columns `span` of a view of a narrowed buffer."""
        whole = view.offset + span[0], view.offset + span[1]
        tile = next(t for t in self.tiles[view.buffer.index] if t.span == whole)
        return View(self.buffers[view.buffer.index], tile.first, span[1] - span[0])

    def _own_heads(self) -> dict[Region, Span]:
        heads: dict[Region, Span] = {}
        for op in self._source.operations():
            if isinstance(op, Attention):
                size = op.heads // self.tensor * op.head_dim
                heads[region(op.q)] = self._place * size, (self._place + 1) * size
            elif isinstance(op, StoreKV):
                cache = self._source.caches[op.cache]
                first, end = self.kv_span(cache.kv_heads)
                for view in (op.k, op.v):
                    heads[region(view)] = first * cache.head_dim, end * cache.head_dim
        for op in reversed(list(self._source.operations())):
            if _keeps_heads(op) and region(op.outputs[0]) in heads:
                heads.setdefault(region(op.inputs[0]), heads[region(op.outputs[0])])
        return heads

    def _narrowed(self) -> dict[int, list[Tile]]:
        """Return results of products that hold several heads' or both halves' columns, where all
        that reads them needs the rank's columns only."""
        readers: dict[int, list[tuple[Op, View]]] = {}
        for op in self._source.operations():
            for view in op.inputs:
                readers.setdefault(view.buffer.index, []).append((op, view))
        narrowed: dict[int, list[Tile]] = {}
        for op in self._source.operations():
            if isinstance(op, Linear) and fills(op.y):
                spans = self._spans(op.y, readers.get(op.y.buffer.index, []))
                if spans is not None:
                    narrowed[op.y.buffer.index] = _tiled(spans)
        return narrowed

    def _spans(self, y: View, readers: list[tuple[Op, View]]) -> list[Span] | None:
        """Return the rank's columns of a product's result; None where something reads others
        too."""
        regions = sorted({region(view)[1:] for _, view in readers})
        ends = [offset + width for offset, width in regions]
        if not regions or [0, *ends] != [*(offset for offset, _ in regions), y.width]:
            return None
        if len(readers) == 2 and all(isinstance(op, Activation) for op, _ in readers):
            (_, width), (_, other) = regions
            unit = self.unit(width)
            if width != other or unit is None:
                return None
            start, end = self.share(width, unit)
            return [(offset + start, offset + end) for offset, _ in regions]
        if self._context > 1:  # each rank computes columns of heads that several have
            return None
        if not all(isinstance(op, Attention) or self.is_of_heads(op) for op, _ in readers):
            return None
        own = [self.heads[y.buffer.index, *columns] for columns in regions]
        return [
            (offset + start, offset + end)
            for (offset, _), (start, end) in zip(regions, own, strict=True)
        ]

    def _buffer(self, buffer: Buffer) -> Buffer:
        tiles = self.tiles.get(buffer.index)
        if tiles is None:
            return buffer
        return replace(buffer, width=sum(end - start for start, end in (t.span for t in tiles)))


def region(view: View) -> Region:
    """Return where a view is."""
    return view.buffer.index, view.offset, view.width


def fills(view: View) -> bool:
    """Return whether a view has all columns of its buffer."""
    return view.offset == 0 and view.width == view.buffer.width


def _keeps_heads(op: Op) -> bool:
    """Return whether columns of a head depend on the same head only, from input to output."""
    is_by_head = isinstance(op, Norm) and op.group > 0 and op.delta is None
    return is_by_head or isinstance(op, Rope | Copy | Scale | SoftCap)


def _tiled(spans: list[Span]) -> list[Tile]:
    tiles, first = [], 0
    for span in spans:
        tiles.append(Tile(span, first))
        first += span[1] - span[0]
    return tiles
