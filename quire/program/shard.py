"""shard: a rank's share of a program under tensor parallelism. A rewrite; loads nothing.

    shard(program, degree=2, rank=0)

Every product is split by its outputs: a rank has some rows of the weight and computes those columns
of the result, with the whole input. Where whole rows are needed again an AllGather exchanges the
columns. No sum is ever split, so all bits are those of the whole program, at every degree. In the
mode `fast` products of such columns are split by these inputs instead, and their sums exchanged
(row_parallel.py).

Queries, keys and values are split by heads, and a rank's KV cache has its KV heads only; where
there are fewer KV heads than ranks, several ranks have the same one. Gate and up are split alike,
so that their activation needs no exchange. A product of fewer outputs than ranks stays whole, and
so do embeddings; a head that is also the embedding becomes a weight of its own. What elementwise
operations compute from some columns is exchanged after them, once per result.

Experts are split alike, each by itself: their inner columns are exchanged inside the operation. Or
whole experts are distributed (expert_parallel.py). A router is whole on each rank, so that all
choose the same.

Always holds: buffers keep their numbers, and each rank exchanges at the same places the same
columns. Refused by name: fp8 weights, and head counts that do not divide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quire.base.errors import SettingError
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.declarations import CacheSpec, Weight, WeightPart
from quire.program.expert_ops import Experts, Route
from quire.program.expert_parallel import ExpertPlacement, Span, spans_of
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
from quire.program.row_parallel import TpMode, with_columns
from quire.program.tensors import Buffer, View

# Rows of a panel of packed weights: shares of whole panels are computed without padding.
PANEL_ROWS = 32
MAX_DEGREE = 64

Region = tuple[int, int, int]  # buffer, offset and width of a view
# Of no mixture: every expert is split by columns.
SPLIT_EXPERTS = ExpertPlacement({})


def shard(
    program: Program,
    *,
    degree: int,
    rank: int,
    placement: ExpertPlacement = SPLIT_EXPERTS,
    mode: TpMode = TpMode.EXACT,
) -> Program:
    """Return the program of rank `rank` of `degree`; the program itself for a degree of 1.

    placement: the ranks of whole experts; experts that it does not name are split. mode: whether
    products of columns that ranks have computed are split by these inputs (row_parallel.py). Raises
    SettingError with the degrees that work where this one does not.
    """
    check_degree(program, degree, placement)
    if not 0 <= rank < degree:
        raise SettingError(f"rank is {rank}; 0 to {degree - 1} are allowed for {degree} ranks")
    if degree == 1:
        return program
    return _Sharding(program, degree, rank, placement, mode).program()


def check_degree(program: Program, degree: int, placement: ExpertPlacement = SPLIT_EXPERTS) -> None:
    """Raise SettingError unless the program can be split over `degree` ranks."""
    if not 1 <= degree <= MAX_DEGREE:
        raise SettingError(f"tensor_parallel_size is {degree}; 1 to {MAX_DEGREE} are allowed")
    problems = _problems(program, degree, placement)
    if degree > 1 and problems:
        raise SettingError(
            f"tensor_parallel_size is {degree}; {program.name} cannot be split over ranks: "
            + "; ".join(problems)
        )
    if not _divides(program, degree):
        works = [str(other) for other in range(1, MAX_DEGREE + 1) if _divides(program, other)]
        heads = " and ".join(f"{h} heads over {kv}" for h, kv in sorted(_head_counts(program)))
        raise SettingError(
            f"tensor_parallel_size is {degree}; {program.name} has {heads} KV heads, which do not "
            f"divide over so many ranks; these degrees work: {', '.join(works)}"
        )


def _problems(program: Program, degree: int, placement: ExpertPlacement) -> list[str]:
    problems = []
    inner = [
        program.weights[op.down]
        for op in _ops(program)
        if isinstance(op, Experts) and not placement.of(op)
    ]
    if any(min(down.columns, down.expert_rows) < degree for down in inner):
        problems.append(f"its experts have fewer columns than {degree}")
    floats = [w.name for w in program.weights.values() if w.quantized and w.quantized.is_float]
    if floats:
        problems.append(
            f"{len(floats)} of its weights are kept in fp8 ({floats[0]} and so on), which shares "
            "blocks of rows; --quantization none, int8 or int4 can be split"
        )
    return problems


def _ops(program: Program) -> Iterator[Op]:
    for ops in program.segments.values():
        yield from ops


def _head_counts(program: Program) -> set[tuple[int, int]]:
    return {(op.heads, op.kv_heads) for op in _ops(program) if isinstance(op, Attention)}


def _divides(program: Program, degree: int) -> bool:
    return all(
        heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)
        for heads, kv_heads in _head_counts(program)
    )


def kv_span(kv_heads: int, rank: int, degree: int) -> Span:
    """Return the KV heads of a rank; where there are fewer than ranks, several have the same."""
    first = rank * kv_heads // degree
    return first, first + max(kv_heads // degree, 1)


def _region(view: View) -> Region:
    return view.buffer.index, view.offset, view.width


@dataclass(frozen=True, slots=True)
class _Tile:
    """Columns of a narrowed buffer: `span` of them, counted in the whole buffer, from `first`."""

    span: Span
    first: int


@dataclass(frozen=True, slots=True)
class _Split:
    """Columns of a whole buffer, of which each rank has computed its share."""

    region: Region
    unit: int


class _Sharding:
    """One rewrite. A buffer is whole, narrowed (`_tiles`: it has room for the rank's columns only),
    or split: `_split` has ranges of its columns, of each of which the rank has computed a share."""

    def __init__(
        self,
        program: Program,
        degree: int,
        rank: int,
        placement: ExpertPlacement,
        mode: TpMode,
    ) -> None:
        self._source, self._degree, self._rank = program, degree, rank
        self._placement, self._mode = placement, mode
        self._routed = {op.x.buffer.index for op in _ops(program) if isinstance(op, Route)}
        self._heads = self._own_heads()
        self._tiles = self._narrowed()
        self._buffers = tuple(self._buffer(buffer) for buffer in program.buffers)
        self._split: dict[int, list[_Split]] = {}
        self._used: dict[int, list[_Split]] = {}  # split, and read by a product of its own columns
        self._weights: dict[str, Weight] = dict(program.weights)
        self._uses = Counter(name for op in _ops(program) for name in op.weights)
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
            buffers=self._buffers,
            segments=segments,
            weights=self._weights,
            caches=tuple(self._cache(cache) for cache in source.caches),
            outputs={name: self._over(view) for name, view in source.outputs.items()},
            elsewhere=self._elsewhere(),
        )

    def _elsewhere(self) -> dict[str, tuple[int, ...]]:
        """The tensors of which other ranks have all rows."""
        own = {part.source for weight in self._weights.values() for part in weight.parts}
        shapes = self._source.source_shapes()
        return {source: shape for source, shape in shapes.items() if source not in own}

    # ---- what belongs to the rank, decided before the rewrite

    def _own_heads(self) -> dict[Region, Span]:
        """The rank's columns of each view that holds heads, counted within the view."""
        heads: dict[Region, Span] = {}
        for op in _ops(self._source):
            if isinstance(op, Attention):
                size = op.heads // self._degree * op.head_dim
                heads[_region(op.q)] = self._rank * size, (self._rank + 1) * size
            elif isinstance(op, StoreKV):
                cache = self._source.caches[op.cache]
                first, end = kv_span(cache.kv_heads, self._rank, self._degree)
                for view in (op.k, op.v):
                    heads[_region(view)] = first * cache.head_dim, end * cache.head_dim
        for op in reversed(list(_ops(self._source))):
            if _keeps_heads(op) and _region(op.outputs[0]) in heads:
                heads.setdefault(_region(op.inputs[0]), heads[_region(op.outputs[0])])
        return heads

    def _narrowed(self) -> dict[int, list[_Tile]]:
        """Results of products that hold several heads' or both halves' columns, where all that
        reads them needs the rank's columns only."""
        readers: dict[int, list[tuple[Op, View]]] = {}
        for op in _ops(self._source):
            for view in op.inputs:
                readers.setdefault(view.buffer.index, []).append((op, view))
        narrowed: dict[int, list[_Tile]] = {}
        for op in _ops(self._source):
            if isinstance(op, Linear) and _fills(op.y):
                spans = self._spans(op.y, readers.get(op.y.buffer.index, []))
                if spans is not None:
                    narrowed[op.y.buffer.index] = _tiled(spans)
        return narrowed

    def _spans(self, y: View, readers: list[tuple[Op, View]]) -> list[Span] | None:
        """The rank's columns of a product's result; None where something reads others too."""
        regions = sorted({_region(view)[1:] for _, view in readers})
        ends = [offset + width for offset, width in regions]
        if not regions or [0, *ends] != [*(offset for offset, _ in regions), y.width]:
            return None
        if len(readers) == 2 and all(isinstance(op, Activation) for op, _ in readers):
            (_, width), (_, other) = regions
            unit = self._unit(width)
            if width != other or unit is None:
                return None
            start, end = share_of(width, unit, self._rank, self._degree)
            return [(offset + start, offset + end) for offset, _ in regions]
        if not all(isinstance(op, Attention) or self._is_of_heads(op) for op, _ in readers):
            return None
        own = [self._heads[y.buffer.index, *region] for region in regions]
        return [
            (offset + start, offset + end)
            for (offset, _), (start, end) in zip(regions, own, strict=True)
        ]

    def _unit(self, width: int) -> int | None:
        """The unit in which `width` columns are split; None: too few to be split."""
        if -(-width // PANEL_ROWS) >= self._degree:
            return PANEL_ROWS
        return 1 if width >= self._degree else None

    def _buffer(self, buffer: Buffer) -> Buffer:
        tiles = self._tiles.get(buffer.index)
        if tiles is None:
            return buffer
        return replace(buffer, width=sum(end - start for start, end in (t.span for t in tiles)))

    def _cache(self, cache: CacheSpec) -> CacheSpec:
        first, end = kv_span(cache.kv_heads, self._rank, self._degree)
        return replace(cache, kv_heads=end - first)

    # ---- operation by operation

    def _rewritten(self, op: Op) -> Op:
        """Return the rank's operation, after the exchanges it needs."""
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
        if self._is_of_heads(op):
            return self._of_heads(op)
        if isinstance(op, Activation):
            return self._activation(op)
        if isinstance(op, Scale | SoftCap | Copy) and self._is_split(op.x):
            unit = self._split[op.x.buffer.index][0].unit
            if isinstance(op, Copy) and _fills(op.y):
                self._note_split(op.y, unit)
                return op.with_views(lambda view: self._share(view, unit))
            if not isinstance(op, Copy):
                return op.with_views(lambda view: self._share(view, unit))
        for view in op.inputs:
            self._whole(view)
        return op.with_views(self._over)

    def _linear(self, op: Linear) -> list[Linear]:
        """The rank's product; one for each part of the weight where their columns are exchanged,
        since every rank has rows of every tensor."""
        self._whole(op.x)
        x, weight = self._over(op.x), self._source.weights[op.weight]
        tiles = self._tiles.get(op.y.buffer.index)
        if tiles is not None:
            spans = [tile.span for tile in tiles]
            return [self._product(op, x, self._over(op.y), spans)]
        made, first = [], 0
        for part in weight.parts:
            end, name = first + part.rows, f".{part.name}" if len(weight.parts) > 1 else ""
            y, unit = op.y.columns(first, part.rows), self._unit(part.rows)
            if unit is None or op.y.buffer.index in self._routed:
                made.append(self._product(op, x, self._over(y), [(first, end)], name))
            else:
                self._note_split(y, unit)
                start, stop = share_of(part.rows, unit, self._rank, self._degree)
                span = first + start, first + stop
                made.append(self._product(op, x, self._share(y, unit), [span], name))
            first = end
        return made

    def _is_row_parallel(self, op: Linear) -> bool:
        """Return whether a product is split by its inputs, of which the rank has a share."""
        if self._mode is TpMode.EXACT or not self._is_split(op.x):
            return False
        is_own = self._uses[op.weight] == 1 and (op.bias is None or self._uses[op.bias] == 1)
        index = op.y.buffer.index
        is_whole = index not in self._routed and index not in self._tiles
        return is_own and is_whole and self._unit(op.y.width) is not None

    def _row_parallel(self, op: Linear) -> AllReduce:
        """The product of the rank's columns, added up over the ranks; a bias by rank 0."""
        (split,) = self._split.pop(op.x.buffer.index)
        self._used[op.x.buffer.index] = [split]
        start, end = share_of(op.x.width, split.unit, self._rank, self._degree)
        self._weights[op.weight] = with_columns(self._source.weights[op.weight], start, end)
        bias = op.bias if self._rank == 0 else None
        if op.bias is not None and bias is None:
            del self._weights[op.bias]
        y = self._over(op.y)
        self._out.append(replace(op, x=self._share(op.x, split.unit), y=y, bias=bias))
        return self._sum(y)

    def _sum(self, y: View) -> AllReduce:
        unit = self._unit(y.width)
        assert unit is not None, "products of fewer outputs than ranks stay whole"
        return AllReduce(x=y, rank=self._rank, degree=self._degree, unit=unit)

    def _product(self, op: Linear, x: View, y: View, spans: list[Span], suffix: str = "") -> Linear:
        weight = self._sliced(op.weight, spans, suffix)
        bias = None if op.bias is None else self._sliced(op.bias, spans, suffix)
        return replace(op, x=x, y=y, weight=weight, bias=bias)

    def _attention(self, op: Attention) -> Attention:
        unit = op.heads // self._degree * op.head_dim
        first, end = kv_span(op.kv_heads, self._rank, self._degree)
        self._note_split(op.y, unit)
        return replace(
            op,
            q=self._own_columns(op.q),
            y=self._share(op.y, unit),
            heads=op.heads // self._degree,
            kv_heads=end - first,
        )

    def _is_of_heads(self, op: Op) -> bool:
        """Return whether an operation can compute the rank's heads only."""
        views = (*op.inputs, *op.outputs)
        can = _keeps_heads(op) or isinstance(op, StoreKV)
        return can and all(_region(view) in self._heads for view in views)

    def _experts(self, op: Experts) -> Experts | AllReduce:
        for view in op.inputs:
            self._whole(view)
        if holders := self._placement.of(op):
            return self._whole_experts(op, holders)
        down = self._source.weights[op.down]
        inner, width, experts = down.columns, op.y.width, range(down.experts)
        inner_unit, unit = self._unit(inner), self._unit(width)
        assert inner_unit is not None, "check_degree refuses too few columns"
        assert unit is not None, "check_degree refuses too few columns"
        start, end = share_of(inner, inner_unit, self._rank, self._degree)
        halves = [(2 * expert + half) * inner for expert in experts for half in (0, 1)]
        gate_up = self._sliced(op.gate_up, [(at + start, at + end) for at in halves], "")
        if self._mode is TpMode.FAST:
            self._weights[op.down] = with_columns(down, start, end)
            views = op.with_views(self._over)
            self._out.append(replace(views, gate_up=gate_up))
            return self._sum(views.y)
        first, last = share_of(width, unit, self._rank, self._degree)
        self._note_split(op.y, unit)
        return replace(
            op,
            x=self._over(op.x),
            routing=self._over(op.routing),
            y=self._share(op.y, unit),
            gate_up=gate_up,
            down=self._sliced(
                op.down, [(at * width + first, at * width + last) for at in experts], ""
            ),
            rank=self._rank,
            degree=self._degree,
            unit=inner_unit,
        )

    def _whole_experts(self, op: Experts, holders: tuple[int, ...]) -> Experts:
        """The rank's experts, and its columns of the sum over all of them."""
        unit = self._unit(op.y.width)
        assert unit is not None, "check_degree refuses too few columns"
        self._note_split(op.y, unit)
        made = replace(op, rank=self._rank, degree=self._degree, unit=unit, holders=holders)
        own, weights = made.own_experts, self._source.weights
        return replace(
            made,
            x=self._over(op.x),
            routing=self._over(op.routing),
            y=self._share(op.y, unit),
            gate_up=self._sliced(op.gate_up, spans_of(weights[op.gate_up], own), "", len(own)),
            down=self._sliced(op.down, spans_of(weights[op.down], own), "", len(own)),
        )

    def _of_heads(self, op: Op) -> Op:
        """An operation on heads: the rank's only."""
        made: Op = op.with_views(self._own_columns)
        if isinstance(made, Rope):
            made = replace(made, heads=made.x.width // made.head_dim)
        return made

    def _activation(self, op: Activation) -> Activation:
        tiles = self._tiles.get(op.gate.buffer.index)
        unit = None
        if tiles is not None and _fills(op.y):
            unit = self._unit(op.y.width)
        elif all(self._is_split(view) for view in op.inputs) and _fills(op.y):
            units = {self._split[view.buffer.index][0].unit for view in op.inputs}
            unit = units.pop() if len(units) == 1 else None
        if unit is None:
            for view in op.inputs:
                self._whole(view)
            return op.with_views(self._over)
        self._note_split(op.y, unit)

        def own(view: View) -> View:
            if view.buffer.index in self._tiles:
                start, end = share_of(view.width, unit, self._rank, self._degree)
                return self._tile_view(view, (start, end))
            return self._share(view, unit)

        return op.with_views(own)

    # ---- views and weights

    def _is_split(self, view: View) -> bool:
        """Return whether a view is all of a buffer that is split as a whole."""
        ranges = self._split.get(view.buffer.index, [])
        return _fills(view) and [one.region for one in ranges] == [_region(view)]

    def _note_split(self, view: View, unit: int) -> None:
        """Note that the rank computes its share of a view, in units."""
        self._split.setdefault(view.buffer.index, []).append(_Split(_region(view), unit))

    def _over(self, view: View) -> View:
        """The view on the rank's buffer: all of a narrowed one, else the same columns."""
        buffer = self._buffers[view.buffer.index]
        if view.buffer.index in self._tiles:
            return View(buffer, 0, buffer.width)
        return replace(view, buffer=buffer)

    def _share(self, view: View, unit: int) -> View:
        """The rank's columns of a view of a whole buffer."""
        start, end = share_of(view.width, unit, self._rank, self._degree)
        return self._over(view).columns(start, end - start)

    def _own_columns(self, view: View) -> View:
        """The rank's columns of a view that holds heads."""
        span = self._heads[_region(view)]
        if view.buffer.index in self._tiles:
            return self._tile_view(view, span)
        self._whole(view)
        return self._over(view).columns(span[0], span[1] - span[0])

    def _tile_view(self, view: View, span: Span) -> View:
        whole = view.offset + span[0], view.offset + span[1]
        tile = next(t for t in self._tiles[view.buffer.index] if t.span == whole)
        return View(self._buffers[view.buffer.index], tile.first, span[1] - span[0])

    def _whole(self, view: View) -> None:
        """Exchange the columns of a buffer that is split."""
        index = view.buffer.index
        for one in self._split.pop(index, []) or self._used.pop(index, []):
            buffer, (_, offset, width) = self._buffers[view.buffer.index], one.region
            x = View(buffer, offset, width)
            self._out.append(AllGather(x=x, rank=self._rank, degree=self._degree, unit=one.unit))

    def _reads(self, segments: Iterable[str]) -> Iterator[View]:
        for name in segments:
            for op in self._source.segments[name]:
                yield from op.inputs

    def _sliced(self, name: str, spans: list[Span], suffix: str, experts: int | None = None) -> str:
        """Declare the rows `spans` of a weight, of so many experts; under a name of its own where
        another operation uses the weight too."""
        weight = self._source.weights[name]
        experts = weight.experts if experts is None else experts
        if self._uses[name] == 1:
            own_name = name + suffix
            if suffix:
                self._weights.pop(name, None)
        else:
            own_name = f"{name}.share{suffix}"
        parts = tuple(part for span in spans for part in _rows_of(weight, span))
        self._weights[own_name] = replace(weight, name=own_name, parts=parts, experts=experts)
        return own_name


def _fills(view: View) -> bool:
    """Return whether a view has all columns of its buffer."""
    return view.offset == 0 and view.width == view.buffer.width


def _keeps_heads(op: Op) -> bool:
    """Return whether columns of a head depend on the same head only, from input to output."""
    is_by_head = isinstance(op, Norm) and op.group > 0 and op.delta is None
    return is_by_head or isinstance(op, Rope | Copy | Scale | SoftCap)


def _tiled(spans: list[Span]) -> list[_Tile]:
    tiles, first = [], 0
    for span in spans:
        tiles.append(_Tile(span, first))
        first += span[1] - span[0]
    return tiles


def _rows_of(weight: Weight, span: Span) -> Iterator[WeightPart]:
    """The parts that rows [start, end) of a weight come from."""
    before = 0
    for part in weight.parts:
        start, end = max(span[0], before), min(span[1], before + part.rows)
        if start == before and end == before + part.rows:
            yield part
        elif start < end:
            yield replace(
                part,
                rows=end - start,
                first_row=part.first_row + start - before,
                of_rows=part.of_rows or part.rows,
            )
        before += part.rows
