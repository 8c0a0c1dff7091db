"""A Program: segments of operations over named buffers, the weights and caches they need.

Frozen once built. Knows no executor and holds no data. Always holds: every view lies inside its
buffer, every weight an operation names is in the table, every buffer read was written before
(in the same segment, or in an earlier one), and parts that name one source agree on its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from quire.program.cost import Cost, StepShape
from quire.program.declarations import CacheSpec, RopeSpec, Weight, WeightForm
from quire.program.ops import Attention, Op
from quire.program.tensors import Buffer, View

# Part of every fingerprint: raised when a recipe changes so that results differ in any bit.
NUMERICS_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model written down.

    segments: name -> operations; "trunk" runs on all token rows of a step, "head" on slices of
    the sample rows (after its gather_rows). outputs: named taps, at least "hidden" (trunk) and
    "logits" (head, f32). vocab_size is the width of the logits. elsewhere: tensors that other ranks
    have instead, with their shapes; a checkpoint is compared and digested whole. is_part: others
    have the rest of the model (quire/program/split.py): its checkpoint has more than this needs.
    """

    name: str
    buffers: tuple[Buffer, ...]
    segments: Mapping[str, tuple[Op, ...]]
    weights: Mapping[str, Weight]
    caches: tuple[CacheSpec, ...]
    ropes: tuple[RopeSpec, ...]
    outputs: Mapping[str, View]
    vocab_size: int
    max_positions: int
    elsewhere: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    is_part: bool = False

    def __post_init__(self) -> None:
        self._check_sources()
        written: set[int] = set()
        for segment, ops in self.segments.items():
            for index, op in enumerate(ops):
                where = f"{self.name}: {segment}[{index}] {op.kind}"
                try:
                    self._check_op(op, written)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
                written.update(view.buffer.index for view in op.outputs)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return sum(weight.num_bytes for weight in self.weights.values())

    def operations(self) -> Iterator[Op]:
        """Yield the operations of all segments, in order."""
        for ops in self.segments.values():
            yield from ops

    def segment_cost(self, segment: str, step: StepShape) -> Cost:
        """Return the sum over a segment's operations."""
        return sum((op.cost(self, step) for op in self.segments[segment]), Cost())

    def step_cost(self, step: StepShape) -> Cost:
        """Return the sum over all segments."""
        return sum((self.segment_cost(segment, step) for segment in self.segments), Cost())

    @property
    def layer_starts(self) -> tuple[int, ...]:
        """Where each layer of the trunk begins: at its attention. What comes before the first
        belongs to it."""
        trunk = self.segments["trunk"]
        return tuple(at for at, op in enumerate(trunk) if isinstance(op, Attention))

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shape of each tensor the weights come from, by its name, in the order they are
        named; then those that other ranks have."""
        own = {
            part.source: weight.source_shape(part)
            for weight in self.weights.values()
            for part in weight.parts
        }
        return own | dict(self.elsewhere)

    def _check_op(self, op: Op, written: Set[int]) -> None:
        for view in (*op.inputs, *op.outputs):
            if view.offset + view.width > view.buffer.width:
                raise ValueError(f"{view} is wider than its buffer")
        for view in op.inputs:
            if view.buffer.index not in written:
                raise ValueError(f"{view.buffer.name} is read before written")
        for name in op.weights:
            if name not in self.weights:
                raise ValueError(f"no weight named {name!r}")
        op.check(self)

    def _check_sources(self) -> None:
        shapes = self.source_shapes()
        for weight in self.weights.values():
            if weight.scheme and (weight.form is not WeightForm.MATRIX or weight.quantized is None):
                raise ValueError(
                    f"{self.name}: weight {weight.name}: a {weight.form} cannot be {weight.scheme}"
                )
            _check_experts(self.name, weight)
            for part in weight.parts:
                where = f"{self.name}: weight {weight.name}: part {part.name}"
                end, total = part.first_row + part.rows, part.of_rows or part.rows
                if part.rows < 1 or part.first_row < 0 or end > total:
                    raise ValueError(f"{where}: rows {part.first_row} to {end} of {total}")
                if part.stacked and (part.transposed or total % part.stacked):
                    raise ValueError(f"{where}: {total} rows of {part.stacked} stacked experts")
                if part.transposed and weight.form is WeightForm.VECTOR:
                    raise ValueError(f"{where}: a vector cannot be transposed")
                if weight.source_shape(part) != shapes[part.source]:
                    raise ValueError(
                        f"{where}: {part.source} is {list(weight.source_shape(part))} here and "
                        f"{list(shapes[part.source])} elsewhere"
                    )


def _check_experts(program: str, weight: Weight) -> None:
    """Raise ValueError unless a weight's parts divide evenly over its experts."""
    if not weight.experts:
        return
    ends, end = set(), 0
    for part in weight.parts:
        end += part.rows
        ends.add(end)
    size, left = divmod(weight.rows, weight.experts)
    fits = not left and all(size * (expert + 1) in ends for expert in range(weight.experts))
    if weight.form is not WeightForm.MATRIX or not fits:
        raise ValueError(
            f"{program}: weight {weight.name}: a {weight.form} of {len(weight.parts)} parts, "
            f"{weight.rows} rows, is not {weight.experts} experts of equal size"
        )
