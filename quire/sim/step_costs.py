"""StepCosts: what steps of one program cost, counted once for all operations that cost the same.

A plan asks for hundreds of steps of programs with a thousand operations, nearly all of which are
those of another layer again. Knows no device. Always holds: costs are exactly those of the program
(quire/program/program.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import cached_property
from typing import Any

from quire.program.comm_ops import num_exchanges
from quire.program.cost import Cost, StepShape
from quire.program.declarations import WeightForm
from quire.program.operation import schema
from quire.program.ops import Op
from quire.program.program import Program

_NAMES = tuple(field.name for field in fields(Cost))


class StepCosts:
    """The costs of a program's steps and of their segments, and what it has in all of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._alike = {name: _alike(program, ops) for name, ops in program.segments.items()}

    @cached_property
    def weight_bytes(self) -> int:
        """See Program."""
        return self.program.weight_bytes

    @cached_property
    def product_precision(self) -> str:
        """See the function."""
        return product_precision(self.program)

    @cached_property
    def exchanges(self) -> int:
        """How often a rank waits for the others in a step."""
        return sum(map(num_exchanges, self.program.segments.values()))

    def step_cost(self, step: StepShape) -> Cost:
        """See Program."""
        return sum((self.segment_cost(segment, step) for segment in self._alike), Cost())

    def segment_cost(self, segment: str, step: StepShape) -> Cost:
        """See Program."""
        costs = [(op.cost(self.program, step), num) for op, num in self._alike[segment]]
        return Cost(
            **{name: sum(num * getattr(cost, name) for cost, num in costs) for name in _NAMES}
        )


def _alike(program: Program, ops: tuple[Op, ...]) -> list[tuple[Op, int]]:
    """Return one of each kind of operation that costs the same, and how many there are."""
    first: dict[tuple[Any, ...], Op] = {}
    counts = Counter(_kind(program, op, first) for op in ops)
    return [(first[kind], num) for kind, num in counts.items()]


def _kind(program: Program, op: Op, first: dict[tuple[Any, ...], Op]) -> tuple[Any, ...]:
    """Return all that an operation's cost depends on; note the first of its kind."""
    kind: list[Any] = [type(op)]
    for name, of_field in schema(type(op)).items():
        value: Any = getattr(op, name)
        if name == "layer":
            continue
        if value is not None and of_field.name == "view":
            value = (value.buffer.rows, value.width, value.dtype)
        elif value is not None and of_field.name == "weight":
            weight = program.weights[value]
            value = (weight.form, weight.rows, weight.columns, weight.dtype)
            value += (weight.scheme, weight.experts)
        kind.append(value)
    found = tuple(kind)
    first.setdefault(found, op)
    return found


def product_precision(program: Program) -> str:
    """Return the precision that most weights of products have: "bf16", "int8", ..."""
    sizes: Counter[str] = Counter()
    for weight in program.weights.values():
        if weight.form is WeightForm.MATRIX:
            sizes[(weight.scheme or str(weight.dtype)).partition("-")[0]] += weight.size
    return sizes.most_common(1)[0][0]
