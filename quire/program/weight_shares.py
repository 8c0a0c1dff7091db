"""WeightShares: the rows and columns of weights that a rank has.

Declares a share in place of the whole weight, under a name of its own where another operation uses
the weight too. Knows no buffers and no exchanges. Always holds: a part of a share names the tensor
that it is cut from, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from quire.program.declarations import Weight, WeightPart
from quire.program.expert_parallel import Span
from quire.program.program import Program
from quire.program.row_parallel import with_columns


class WeightShares:
    """The shares of one rank. weights: the program's, with the shares declared so far."""

    def __init__(self, program: Program) -> None:
        self._source = program
        self.weights: dict[str, Weight] = dict(program.weights)
        self._uses = Counter(name for op in program.operations() for name in op.weights)

    def is_used_once(self, name: str | None) -> bool:
        """Return whether one operation uses a weight, or there is none."""
        return name is None or self._uses[name] == 1

    def rows(self, name: str, spans: list[Span], suffix: str, experts: int | None = None) -> str:
        """Declare the rows `spans` of a weight, of so many experts; return the name."""
        weight = self._source.weights[name]
        experts = weight.experts if experts is None else experts
        if self._uses[name] == 1:
            own_name = name + suffix
            if suffix:
                self.weights.pop(name, None)
        else:
            own_name = f"{name}.share{suffix}"
        parts = tuple(part for span in spans for part in _rows_of(weight, span))
        own = replace(weight, name=own_name, parts=parts, experts=experts)
        if not experts and own.rows != weight.rows:
            own = replace(own, whole_rows=weight.undivided_rows)
        self.weights[own_name] = own
        return own_name

    def columns(self, name: str, span: Span) -> None:
        """Declare columns `span` of a weight in its place. Raises SettingError."""
        self.weights[name] = with_columns(self._source.weights[name], *span)

    def drop(self, name: str) -> None:
        """Leave out a weight that another rank has."""
        del self.weights[name]

    def elsewhere(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of which other ranks have all rows."""
        own = {part.source for weight in self.weights.values() for part in weight.parts}
        shapes = self._source.source_shapes()
        return {source: shape for source, shape in shapes.items() if source not in own}


def _rows_of(weight: Weight, span: Span) -> Iterator[WeightPart]:
    """Yield the parts that rows [start, end) of a weight come from."""
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
