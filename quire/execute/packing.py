"""Packing: a program's weights in the kernels' layout, from a checkpoint's mapped files.

Knows parts, sources and their order; how elements are laid out and rounded is native/src/weight.cc.
Always holds: every byte of every tensor is digested once, on the way, and a tensor's pages are
given back when it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire import _native
from quire.execute.executor import Progress
from quire.program.ops import Weight, WeightPart
from quire.program.program import Program
from quire.weights.binding import Binding
from quire.weights.content import WeightsDigest


def pack(
    program: Program,
    binding: Binding,
    pool: _native.Pool,
    digest: WeightsDigest,
    progress: Progress | None,
) -> dict[str, _native.Weight]:
    """All weights in the kernels' layout; source pages are dropped after each tensor."""
    packed: dict[str, _native.Weight] = {}
    total, done = program.weight_bytes, 0
    for name, weight in program.weights.items():
        packed[name] = native = _empty_weight(weight)
        first = 0
        for part in _joined(weight.parts):
            stored = binding.tensor(part)
            content = native.fill(
                pool,
                first,
                part.rows,
                stored.raw,
                stored.dtype,
                weight.offset,
                first_row=part.first_row,
                of_rows=part.of_rows,
                transposed=part.transposed,
                digested=not digest.holds(stored),
            )
            if content is not None:
                digest.add(stored, content)
            binding.release(part)
            first += part.rows
            done += part.rows * weight.row_bytes
            if progress is not None:
                progress(done, total)
    return packed


def _joined(parts: Sequence[WeightPart]) -> list[WeightPart]:
    """The same rows in fewer parts: those that follow each other in one source too are one."""
    joined: list[WeightPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source == part.source
            and last.first_row + last.rows == part.first_row
        ):
            joined[-1] = replace(last, rows=last.rows + part.rows)
        else:
            joined.append(part)
    return joined


def _empty_weight(weight: Weight) -> _native.Weight:
    return _native.Weight(
        str(weight.form), str(weight.dtype), weight.rows, max(weight.columns, 1), weight.scheme
    )
