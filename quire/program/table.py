"""Prints a program as a table a person can read: operations, shapes, bytes and operations.

Row counts stay symbols in shapes (T token rows, S sample rows, Q sequences); the numbers beside
them are for one given step. Layers that repeat are shown once and counted, unless all are asked
for. Knows no terminal: it returns text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quire.program.cost import Cost, StepShape
from quire.program.declarations import WeightForm
from quire.program.operation import schema
from quire.program.ops import Op
from quire.program.program import Program
from quire.program.tensors import Rows, View

SYMBOLS = MappingProxyType({Rows.TOKENS: "T", Rows.SAMPLES: "S", Rows.SEQUENCES: "Q"})
HEADINGS = ("#", "operation", "reads", "writes", "with", "operations", "weights", "KV", "received")
RIGHT_ALIGNED = (0, 5, 6, 7, 8)
MIN_HIDDEN = 4


def format_program(program: Program, step: StepShape, *, all_layers: bool = False) -> str:
    """Return the table, its totals, and a summary of weights and caches, as lines of text."""
    blocks = [_title(program, step)]
    for segment in program.segments:
        blocks.append(_segment(program, segment, step, all_layers=all_layers))
    blocks.append(_summary(program, step))
    return "\n\n".join(blocks) + "\n"


def amount(number: float, unit: str = "") -> str:
    """Write a count with a metric prefix: 1234567 is "1.23 M"; with unit "B", "1.23 MB"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            digits = f"{number / size:.3g}" if number < 999.5 * size else f"{number / size:.0f}"
            return f"{digits} {prefix}{unit}"
    return f"{number:.0f} {unit}".rstrip()


@dataclass(frozen=True, slots=True)
class _Repeat:
    """From index `start` on, `length` operations repeat in turn until index `end`."""

    start: int
    length: int
    end: int

    @property
    def hidden(self) -> int:
        """Operations after the first turn."""
        return self.end - self.start - self.length


def _title(program: Program, step: StepShape) -> str:
    tokens, samples = step.rows(Rows.TOKENS), step.rows(Rows.SAMPLES)
    sequences = step.rows(Rows.SEQUENCES)
    return (
        f"{program.name}, up to {program.max_positions} positions\n"
        f"numbers for a step of T = {tokens} tokens of Q = {sequences} sequences at depth "
        f"{_span(step.starts.tolist())}, S = {samples} sampled rows"
    )


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "0"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _segment(program: Program, segment: str, step: StepShape, *, all_layers: bool) -> str:
    ops = program.segments[segment]
    repeat = None if all_layers else _longest_repeat([_signature(program, op) for op in ops])
    lines: list[tuple[str, ...]] = [HEADINGS]
    index = 0
    while index < len(ops):
        lines.append(_row(program, index, ops[index], step))
        index += 1
        if repeat is not None and index == repeat.start + repeat.length:
            cost = sum((op.cost(program, step) for op in ops[index : repeat.end]), Cost())
            text = f"... the same {repeat.length} in turn, {repeat.hidden} more operations"
            lines.append(("", text, "", "", "", *_numbers(cost)))
            index = repeat.end
    total = program.segment_cost(segment, step)
    lines.append(("", f"{segment}: {len(ops)} operations", "", "", "", *_numbers(total)))
    return f"segment {segment}\n" + _aligned(lines)


def _row(program: Program, index: int, op: Op, step: StepShape) -> tuple[str, ...]:
    reads = ", ".join(str(view) for view in op.inputs)
    writes = ", ".join(
        f"{view} in place" if view in op.inputs else _shape(view) for view in op.outputs
    )
    cost = op.cost(program, step)
    return (str(index), op.kind, reads, writes, op.detail(program), *_numbers(cost))


def _numbers(cost: Cost) -> tuple[str, ...]:
    return (
        amount(cost.operations),
        amount(cost.weight_bytes, "B") if cost.weight_bytes else "",
        amount(cost.kv_bytes, "B") if cost.kv_bytes else "",
        amount(cost.comm_bytes, "B") if cost.comm_bytes else "",
    )


def _shape(view: View) -> str:
    return f"{view} [{SYMBOLS[view.buffer.rows]} x {view.width}] {view.dtype}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Return columns padded to their widest cell; a row without shapes may run over the empty ones.
    The last column is left out where it is empty: one process receives nothing."""
    if not any(line[-1] for line in lines[1:]):
        lines = [line[:-1] for line in lines]
    widths = [
        max(
            len(line[column])
            for line in lines
            if column in RIGHT_ALIGNED[1:] or line[column + 1 : column + 2] != ("",)
        )
        for column in range(len(lines[0]))
    ]
    return "\n".join(_aligned_line(line, widths) for line in lines)


def _aligned_line(line: tuple[str, ...], widths: Sequence[int]) -> str:
    text, place = "", 0
    for column, (cell, width) in enumerate(zip(line, widths, strict=True)):
        if column in RIGHT_ALIGNED:
            cell = cell.rjust(width)
        text = text.ljust(place) + cell
        place += width + 2
    return text.rstrip()


def _signature(program: Program, op: Op) -> tuple[object, ...]:
    """Return a value that is equal for operations that differ only in layer and weight names."""
    weights = [program.weights[name] for name in op.weights]
    skipped = {"layer"} | {n for n, kind in schema(type(op)).items() if kind.name == "weight"}
    return (
        op.kind,
        tuple((v.buffer.rows, v.offset, v.width, v.dtype) for v in (*op.inputs, *op.outputs)),
        tuple((name, value) for name, value in op.parameters.items() if name not in skipped),
        tuple((w.form, w.rows, w.columns, w.dtype, w.scheme, w.experts) for w in weights),
    )


def _longest_repeat(signatures: Sequence[object]) -> _Repeat | None:
    """Return the run of repeats that hides the most operations; the shortest unit, the earliest."""
    best: _Repeat | None = None
    for length in range(1, len(signatures)):
        same = 0
        for index in range(length, len(signatures) + 1):
            if index < len(signatures) and signatures[index] == signatures[index - length]:
                same += 1
                continue
            if same >= MIN_HIDDEN and (best is None or same > best.hidden):
                best = _Repeat(index - same - length, length, index)
            same = 0
    return best


def _summary(program: Program, step: StepShape) -> str:
    lines = []
    total = program.step_cost(step)
    lines.append(
        f"step:    {amount(total.operations)} operations (products {amount(total.product_ops)}, "
        f"attention {amount(total.attention_ops)}, other {amount(total.other_ops)}); "
        f"{amount(total.memory_bytes, 'B')} from memory (weights "
        f"{amount(total.weight_bytes, 'B')}, KV {amount(total.kv_bytes, 'B')}), "
        f"{amount(total.buffer_bytes, 'B')} in buffers"
        + (f", {amount(total.comm_bytes, 'B')} from other ranks" if total.comm_bytes else "")
    )
    sizes = ", ".join(
        f"{len(group)} {form.value}: {amount(sum(group), 'B')}"
        for form in WeightForm
        if (group := _weight_sizes(program, form))
    )
    elements = sum(weight.size for weight in program.weights.values())
    lines.append(
        f"weights: {amount(elements)} parameters, {amount(program.weight_bytes, 'B')} ({sizes})"
    )
    for cache in program.caches:
        longest = cache.token_bytes * program.max_positions
        lines.append(
            f"cache:   {cache.kind}, {cache.layers} layers of {cache.kv_heads} x "
            f"{cache.head_dim} {cache.precision}: {amount(cache.token_bytes, 'B')} a token, "
            f"{amount(longest, 'B')} for {program.max_positions} positions"
        )
    return "\n".join(lines)


def _weight_sizes(program: Program, form: WeightForm) -> list[int]:
    return [weight.num_bytes for weight in program.weights.values() if weight.form is form]
