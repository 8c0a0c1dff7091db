"""with_pooling: the same program with a segment that computes final hidden rows without logits.

    with_pooling(program)
    without_pooling(with_pooling(program)) == program

The segment "pool" does what the head does before its product with the vocabulary: it gathers rows
and norms them, over buffers of its own, so that it may run at any time between the trunk and the
next step. Its last norm is kept in f32. A rewrite; loads nothing, and declares no weight. Always
holds: trunk and head are unchanged, and a row of "pooled" depends on its own row of "hidden" only.
"""

from __future__ import annotations

from dataclasses import replace

from quire.program.ops import Norm, Op
from quire.program.program import Program
from quire.program.tensors import DType, View

POOL = "pool"
POOLED = "pooled"  # the output: f32 rows, or in the program's dtype where the last op is no norm


def with_pooling(program: Program) -> Program:
    """Return the program with the segment "pool" and its output "pooled".

    Raises ValueError for a program that has one, or with a head that is not a chain of operations
    up to one product that makes the logits.
    """
    if POOL in program.segments:
        raise ValueError(f"{program.name}: the program has a segment {POOL!r} already")
    before = _before_logits(program)
    written = {view.buffer.index for op in before for view in op.outputs}
    last = before[-1].outputs[0]
    is_norm = isinstance(before[-1], Norm)
    buffers, copies = list(program.buffers), dict[int, int]()
    for index in sorted(written):
        buffer, copies[index] = program.buffers[index], len(buffers)
        dtype = DType.F32 if is_norm and index == last.buffer.index else buffer.dtype
        name = f"{POOL}.{buffer.name.split('.')[0]}.{len(buffers)}"
        buffers.append(replace(buffer, index=len(buffers), name=name, dtype=dtype))

    def over(view: View) -> View:
        copy = copies.get(view.buffer.index)
        return view if copy is None else replace(view, buffer=buffers[copy])

    pool: tuple[Op, ...] = tuple(op.with_views(over) for op in before)
    segments = {}
    for name, ops in program.segments.items():
        if name == "head":
            segments[POOL] = pool  # before the head: what that reads of the trunk outlives it
        segments[name] = ops
    return replace(
        program,
        buffers=tuple(buffers),
        segments=segments,
        outputs={**program.outputs, POOLED: over(last)},
    )


def without_pooling(program: Program) -> Program:
    """Return the program as it was before `with_pooling`, the last of its rewrites; a program
    without the segment as it is."""
    if POOL not in program.segments:
        return program
    first = min(view.buffer.index for op in program.segments[POOL] for view in op.outputs)
    segments = {name: ops for name, ops in program.segments.items() if name != POOL}
    outputs = {name: view for name, view in program.outputs.items() if name != POOLED}
    views = [view for ops in segments.values() for op in ops for view in (*op.inputs, *op.outputs)]
    if any(view.buffer.index >= first for view in (*views, *outputs.values())):
        raise ValueError(f"{program.name}: it was rewritten after it got its segment {POOL!r}")
    return replace(program, buffers=program.buffers[:first], segments=segments, outputs=outputs)


def _before_logits(program: Program) -> tuple[Op, ...]:
    """Return the operations of the head before the product that makes the logits."""
    logits, head = program.outputs["logits"].buffer.index, program.segments["head"]
    for at, op in enumerate(head):
        if any(view.buffer.index == logits for view in op.outputs):
            if at:
                return head[:at]
            break
    raise ValueError(
        f"{program.name}: the head has no operation between its rows and the logits, so there are "
        "no final hidden rows to pool"
    )
