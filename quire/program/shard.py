"""shard: a rank's share of a program under tensor and context parallelism; loads nothing.

    shard(program, degree=2, rank=0)
    shard(program, degree=2, rank=0, context=2)

Every product is split by its outputs: a rank has some rows of the weight and computes those columns
of the result, with the whole input. Where whole rows are needed again an AllGather exchanges the
columns. No sum is ever split, so all bits are those of the whole program, at every degree. In the
mode `fast` products of such columns are split by these inputs instead, and their sums exchanged
(row_parallel.py).

Queries, keys and values are split by heads, and a rank's KV cache has its KV heads only; where
there are fewer KV heads than ranks, several ranks have the same one. Under context parallelism
`context` ranks have the same heads, and pieces of positions of their cache by turns: queries, keys
and values are exchanged, and attention leaves each of them its heads. Gate and up are split alike,
so that their activation needs no exchange (rank_columns.py). A product of fewer outputs than ranks
stays whole. A rank looks tokens up in its columns of the embedding, which are then exchanged; a
head that is also the embedding becomes a weight of its own, of rows (weight_shares.py). What
elementwise operations compute from some columns is exchanged after them, once per result.

Experts are split alike, each by itself: their inner columns are exchanged inside the operation; or
ranks have whole experts, under expert parallelism (expert_parallel.py). A router is whole on each
rank, so that all choose the same.

Always holds: buffers keep their numbers, and each rank exchanges at the same places the same
columns. What cannot be split is refused by name (degrees.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quire.base.errors import SettingError
from quire.program.comm_ops import AllGather, AllReduce
from quire.program.degrees import check_degree
from quire.program.expert_ops import Experts, Route
from quire.program.expert_parallel import SPLIT_EXPERTS, ExpertPlacement, Span, spans_of
from quire.program.forms import IdSource
from quire.program.ops import (
    Activation,
    Attention,
    Copy,
    Embed,
    Linear,
    Op,
    Rope,
    Scale,
    SoftCap,
)
from quire.program.program import Program
from quire.program.rank_columns import RankColumns, Region, fills, region
from quire.program.row_parallel import TpMode
from quire.program.tensors import View
from quire.program.weight_shares import WeightShares


def shard(
    program: Program,
    *,
    degree: int,
    rank: int,
    placement: ExpertPlacement = SPLIT_EXPERTS,
    mode: TpMode = TpMode.EXACT,
    context: int = 1,
) -> Program:
    """Return the program of rank `rank` of `degree`; the program itself for a degree of 1.

    placement: the ranks of whole experts; experts that it does not name are split. mode: whether
    products of columns that ranks have computed are split by these inputs (row_parallel.py).
    context: how many consecutive ranks divide the positions of a cache, and no heads. Raises
    SettingError with the degrees that work where this one does not.
    """
    if degree % context or (context > 1 and mode is TpMode.FAST):
        raise SettingError(
            f"{context} ranks divide positions, of {degree} in all, with tp_mode {mode}; degree "
            "must be a multiple of context, and the mode exact where context is above 1"
        )
    check_degree(program, degree, placement, context)
    if not 0 <= rank < degree:
        raise SettingError(f"rank is {rank}; 0 to {degree - 1} are allowed for {degree} ranks")
    if degree == 1:
        return program
    return _Sharding(program, degree, rank, placement, mode, context).program()


@dataclass(frozen=True, slots=True)
class _Split:
    """Columns of a whole buffer, of which each rank has computed its share."""

    region: Region
    unit: int


class _Sharding:
    """One rewrite. A buffer is whole, narrowed (RankColumns.tiles), or split: `_split` has ranges
    of its columns, of each of which the rank has computed a share."""

    def __init__(
        self,
        program: Program,
        degree: int,
        rank: int,
        placement: ExpertPlacement,
        mode: TpMode,
        context: int,
    ) -> None:
        self._source, self._degree, self._rank, self._context = program, degree, rank, context
        self._placement, self._mode = placement, mode
        self._routed = {op.x.buffer.index for op in program.operations() if isinstance(op, Route)}
        self._columns = RankColumns(program, degree, rank, context)
        self._weights = WeightShares(program)
        self._split: dict[int, list[_Split]] = {}
        self._used: dict[int, list[_Split]] = {}  # split, and read by a product of its own columns
        self._out: list[Op] = []

    def program(self) -> Program:
        """Return the rank's program."""
        segments, source = {}, self._source
        left = list(source.segments)
        for name, ops in source.segments.items():
            self._out = []
            for op in ops:
                self._out.append(self._rewritten(op))
                for view in op.outputs:
                    self._used.pop(view.buffer.index, None)
            left.remove(name)
            for view in (*source.outputs.values(), *self._reads(left)):
                self._whole(view)
            segments[name] = tuple(self._out)
        return replace(
            source,
            buffers=self._columns.buffers,
            segments=segments,
            weights=self._weights.weights,
            caches=tuple(self._columns.cache(cache) for cache in source.caches),
            outputs={name: self._over(view) for name, view in source.outputs.items()},
            elsewhere=self._weights.elsewhere(),
        )

    # ---- operation by operation

    def _rewritten(self, op: Op) -> Op:
        """Return the rank's operation, after the exchanges it needs."""
        if isinstance(op, Embed):
            return self._embed(op)
        if isinstance(op, Linear) and self._is_row_parallel(op):
            return self._row_parallel(op)
        if isinstance(op, Linear):
            *first, last = self._linear(op)
            self._out += first
            return last
        if isinstance(op, Attention):
            return self._attention(op)
        if isinstance(op, Experts):
            return self._experts(op)
        if self._columns.is_of_heads(op):
            return self._of_heads(op)
        if isinstance(op, Activation):
            return self._activation(op)
        if isinstance(op, Scale | SoftCap | Copy) and self._is_split(op.x):
            unit = self._split[op.x.buffer.index][0].unit
            if isinstance(op, Copy) and fills(op.y):
                self._note_split(op.y, unit)
                return op.with_views(lambda view: self._share(view, unit))
            if not isinstance(op, Copy):
                return op.with_views(lambda view: self._share(view, unit))
        for view in op.inputs:
            self._whole(view)
        return op.with_views(self._over)

    def _embed(self, op: Embed) -> Embed:
        """Return the lookup of the rank's columns. A table of positions stays whole, since it is
        small, and one of integers, since a scale is that of a whole row."""
        unit, weight = self._columns.unit(op.y.width), self._source.weights[op.weight]
        if unit is None or weight.scheme or op.ids is not IdSource.TOKENS or not fills(op.y):
            return replace(op, y=self._over(op.y))
        self._note_split(op.y, unit)
        self._weights.columns(op.weight, self._columns.share(op.y.width, unit))
        return replace(op, y=self._share(op.y, unit))

    def _linear(self, op: Linear) -> list[Linear]:
        """Return the rank's product; one for each part of the weight where their columns are
        exchanged, since every rank has rows of every tensor."""
        self._whole(op.x)
        x, weight = self._over(op.x), self._source.weights[op.weight]
        tiles = self._columns.tiles.get(op.y.buffer.index)
        if tiles is not None:
            spans = [tile.span for tile in tiles]
            return [self._product(op, x, self._over(op.y), spans)]
        made, first = [], 0
        for part in weight.parts:
            end, name = first + part.rows, f".{part.name}" if len(weight.parts) > 1 else ""
            y, unit = op.y.columns(first, part.rows), self._columns.unit(part.rows)
            if unit is None or op.y.buffer.index in self._routed:
                made.append(self._product(op, x, self._over(y), [(first, end)], name))
            else:
                self._note_split(y, unit)
                start, stop = self._columns.share(part.rows, unit)
                span = first + start, first + stop
                made.append(self._product(op, x, self._share(y, unit), [span], name))
            first = end
        return made

    def _is_row_parallel(self, op: Linear) -> bool:
        """Return whether a product is split by its inputs, of which the rank has a share."""
        if self._mode is TpMode.EXACT or not self._is_split(op.x):
            return False
        is_own = all(map(self._weights.is_used_once, (op.weight, op.bias)))
        index = op.y.buffer.index
        is_whole = index not in self._routed and index not in self._columns.tiles
        return is_own and is_whole and self._columns.unit(op.y.width) is not None

    def _row_parallel(self, op: Linear) -> AllReduce:
        """Return the product of the rank's columns, added up over the ranks; a bias by rank 0."""
        (split,) = self._split.pop(op.x.buffer.index)
        self._used[op.x.buffer.index] = [split]
        self._weights.columns(op.weight, self._columns.share(op.x.width, split.unit))
        bias = op.bias if self._rank == 0 else None
        if op.bias is not None and bias is None:
            self._weights.drop(op.bias)
        y = self._over(op.y)
        self._out.append(replace(op, x=self._share(op.x, split.unit), y=y, bias=bias))
        return self._sum(y)

    def _sum(self, y: View) -> AllReduce:
        return AllReduce(x=y, rank=self._rank, degree=self._degree, unit=self._unit(y.width))

    def _product(self, op: Linear, x: View, y: View, spans: list[Span], suffix: str = "") -> Linear:
        weight = self._weights.rows(op.weight, spans, suffix)
        bias = None if op.bias is None else self._weights.rows(op.bias, spans, suffix)
        return replace(op, x=x, y=y, weight=weight, bias=bias)

    def _attention(self, op: Attention) -> Attention:
        first, end = self._columns.kv_span(op.kv_heads)
        heads = op.heads // self._columns.tensor
        unit = op.head_dim * (1 if self._context > 1 else heads)
        self._note_split(op.y, unit)
        return replace(
            op,
            q=self._own_columns(op.q),
            y=self._share(op.y, unit),
            heads=heads,
            kv_heads=end - first,
            rank=self._rank % self._context,
            degree=self._context,
        )

    def _experts(self, op: Experts) -> Experts | AllReduce:
        for view in op.inputs:
            self._whole(view)
        if holders := self._placement.of(op):
            return self._expert_parallel(op, holders)
        down = self._source.weights[op.down]
        inner, width, experts = down.columns, op.y.width, range(down.experts)
        inner_unit, unit = self._unit(inner), self._unit(width)
        start, end = self._columns.share(inner, inner_unit)
        halves = [(2 * expert + half) * inner for expert in experts for half in (0, 1)]
        gate_up = self._weights.rows(op.gate_up, [(at + start, at + end) for at in halves], "")
        if self._mode is TpMode.FAST:
            self._weights.columns(op.down, (start, end))
            views = op.with_views(self._over)
            self._out.append(replace(views, gate_up=gate_up))
            return self._sum(views.y)
        first, last = self._columns.share(width, unit)
        self._note_split(op.y, unit)
        return replace(
            op,
            x=self._over(op.x),
            routing=self._over(op.routing),
            y=self._share(op.y, unit),
            gate_up=gate_up,
            down=self._weights.rows(
                op.down, [(at * width + first, at * width + last) for at in experts], ""
            ),
            rank=self._rank,
            degree=self._degree,
            unit=inner_unit,
        )

    def _expert_parallel(self, op: Experts, holders: tuple[int, ...]) -> Experts:
        """Return the rank's experts, and its columns of the sum over all of them."""
        unit = self._unit(op.y.width)
        self._note_split(op.y, unit)
        made = replace(op, rank=self._rank, degree=self._degree, unit=unit, holders=holders)
        own, weights = made.own_experts, self._source.weights
        gate_up, down = (spans_of(weights[name], own) for name in (op.gate_up, op.down))
        return replace(
            made,
            x=self._over(op.x),
            routing=self._over(op.routing),
            y=self._share(op.y, unit),
            gate_up=self._weights.rows(op.gate_up, gate_up, "", len(own)),
            down=self._weights.rows(op.down, down, "", len(own)),
        )

    def _of_heads(self, op: Op) -> Op:
        """Return an operation on heads: the rank's only."""
        made: Op = op.with_views(self._own_columns)
        if isinstance(made, Rope):
            made = replace(made, heads=made.x.width // made.head_dim)
        return made

    def _activation(self, op: Activation) -> Activation:
        tiles = self._columns.tiles
        unit = None
        if op.gate.buffer.index in tiles and fills(op.y):
            unit = self._columns.unit(op.y.width)
        elif all(self._is_split(view) for view in op.inputs) and fills(op.y):
            units = {self._split[view.buffer.index][0].unit for view in op.inputs}
            unit = units.pop() if len(units) == 1 else None
        if unit is None:
            for view in op.inputs:
                self._whole(view)
            return op.with_views(self._over)
        self._note_split(op.y, unit)

        def own(view: View) -> View:
            if view.buffer.index in tiles:
                return self._columns.tile_view(view, self._columns.share(view.width, unit))
            return self._share(view, unit)

        return op.with_views(own)

    # ---- views

    def _unit(self, width: int) -> int:
        unit = self._columns.unit(width)
        assert unit is not None, "check_degree refuses too few columns"
        return unit

    def _is_split(self, view: View) -> bool:
        """Return whether a view is all of a buffer that is split as a whole."""
        ranges = self._split.get(view.buffer.index, [])
        return fills(view) and [one.region for one in ranges] == [region(view)]

    def _note_split(self, view: View, unit: int) -> None:
        """Note that the rank computes its share of a view, in units."""
        self._split.setdefault(view.buffer.index, []).append(_Split(region(view), unit))

    def _over(self, view: View) -> View:
        return self._columns.over(view)

    def _share(self, view: View, unit: int) -> View:
        """Return the rank's columns of a view of a whole buffer."""
        start, end = self._columns.share(view.width, unit)
        return self._over(view).columns(start, end - start)

    def _own_columns(self, view: View) -> View:
        """Return the rank's columns of a view that holds heads."""
        span = self._columns.heads[region(view)]
        if view.buffer.index in self._columns.tiles:
            return self._columns.tile_view(view, span)
        self._whole(view)
        return self._over(view).columns(span[0], span[1] - span[0])

    def _whole(self, view: View) -> None:
        """Exchange the columns of a buffer that is split."""
        index = view.buffer.index
        for one in self._split.pop(index, []) or self._used.pop(index, []):
            buffer, (_, offset, width) = self._columns.buffers[index], one.region
            x = View(buffer, offset, width)
            self._out.append(AllGather(x=x, rank=self._rank, degree=self._degree, unit=one.unit))

    def _reads(self, segments: Iterable[str]) -> Iterator[View]:
        for name in segments:
            for op in self._source.segments[name]:
                yield from op.inputs
