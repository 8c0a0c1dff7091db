"""Where each buffer of a program lies in one arena: areas are reused after their last reader.

A pass over the operations in order; a buffer lives from its first use to its last. Always holds:
buffers alive at the same operation never overlap, and what a later segment reads (or the program
names as an output) stays until the next step; taps, which few steps write, lie behind all else, so
that a program has the same places with them as without (what they read is an output, and stays in
any case). Knows no executor's memory, only sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.execute.executor import StepLimits
from quire.program.ops import Tap
from quire.program.program import Program
from quire.program.tensors import Buffer

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A buffer's area: `max_rows` rows of `stride` elements from `offset_bytes`."""

    offset_bytes: int
    stride: int
    max_rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Places by buffer index, and the bytes of the arena that holds them."""

    places: tuple[Place, ...]
    arena_bytes: int


def lay_out(program: Program, limits: StepLimits) -> Layout:
    """Return places for all buffers of `program`, for steps of at most `limits`."""
    lifetimes = _lifetimes(program)
    ops = (op for segment in program.segments.values() for op in segment)
    taps = {op.y.buffer.index for op in ops if isinstance(op, Tap)}
    order = sorted(range(len(program.buffers)), key=lambda index: lifetimes[index][0])
    places: dict[int, Place] = {}
    alive: list[tuple[int, int, int]] = []  # (offset, end, last use), by offset
    arena_bytes = 0
    for index in sorted(order, key=taps.__contains__):
        first, last = lifetimes[index]
        alive = [area for area in alive if area[2] >= first]
        buffer = program.buffers[index]
        stride = _stride(buffer)
        num_bytes = stride * buffer.dtype.itemsize * limits.rows(buffer.rows)
        offset = arena_bytes if index in taps else _lowest_gap(alive, num_bytes)
        alive.append((offset, offset + num_bytes, last))
        alive.sort()
        arena_bytes = max(arena_bytes, offset + num_bytes)
        places[index] = Place(
            offset_bytes=offset,
            stride=stride,
            max_rows=limits.rows(buffer.rows),
            num_bytes=num_bytes,
        )
    return Layout(
        places=tuple(places[index] for index in range(len(program.buffers))),
        arena_bytes=arena_bytes,
    )


def _stride(buffer: Buffer) -> int:
    itemsize = buffer.dtype.itemsize
    return -(-buffer.width * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // itemsize


def _lowest_gap(alive: list[tuple[int, int, int]], num_bytes: int) -> int:
    offset = 0
    for start, end, _ in alive:
        if start - offset >= num_bytes:
            return offset
        offset = max(offset, end)
    return offset


def _lifetimes(program: Program) -> list[tuple[int, int]]:
    """First and last operation of each buffer, counted through all segments in order."""
    spans: dict[int, tuple[int, int]] = {}
    homes: dict[int, str] = {}
    kept = {view.buffer.index for view in program.outputs.values()}
    last_op = 0
    for number, segment, index in _uses(program):
        first, _ = spans.get(index, (number, number))
        spans[index] = (first, number)
        if homes.setdefault(index, segment) != segment:
            kept.add(index)
        last_op = number
    for index in kept:
        spans[index] = (spans[index][0], last_op)
    unused = (0, -1)
    return [spans.get(buffer.index, unused) for buffer in program.buffers]


def _uses(program: Program) -> Iterator[tuple[int, str, int]]:
    """(operation number, segment, buffer index) for every view, in order."""
    number = 0
    for segment, ops in program.segments.items():
        for op in ops:
            for view in (*op.inputs, *op.outputs):
                yield number, segment, view.buffer.index
            number += 1
