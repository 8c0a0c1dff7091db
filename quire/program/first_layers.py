"""first_layers: the program of a model's first layers and its head, which drafts for the model.

    first_layers(program, 4)

The residual stream after layer 4 goes to the norm and head of the model in place of that after the
last layer. A rewrite; loads nothing and knows no executor. Always holds: the operations of the kept
layers, their weights and the layers of their caches are those of `program`, so that an executor can
use the same packed weights and the same keys and values for both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from quire.program.ops import Attention, Op, StoreKV
from quire.program.program import Program
from quire.program.tensors import Buffer, View

# By default one in so many layers drafts (docs/speculation.md has the reason).
LAYERS_PER_DRAFT_LAYER = 5
# Weights of layers are named so in every family.
_OF_LAYER = re.compile(r"^(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Operations of a layer: those from its first weight to its last."""

    begin: int
    end: int


def num_layers(program: Program) -> int:
    """Return the layers of the trunk."""
    return len(program.layer_starts)


def num_draft_layers(program: Program, given: int | None) -> int:
    """Return how many first layers draft: `given`, or the default share, at least one."""
    return max(num_layers(program) // LAYERS_PER_DRAFT_LAYER, 1) if given is None else given


def first_layers(program: Program, num: int) -> Program:
    """Return the program of the first `num` layers; all of them are the program itself.

    Raises ValueError where the layers of the program cannot be separated.
    """
    total = num_layers(program)
    if not 1 <= num <= total:
        raise ValueError(f"{program.name}: the first {num} of {total} layers; take 1 to {total}")
    trunk = program.segments["trunk"]
    spans = layer_spans(program)
    kept, last = spans[num - 1], spans[-1]
    moved = _moved_views(program, trunk[kept.begin : kept.end], trunk[last.begin : last.end])

    def over(view: View) -> View:
        return moved.get(view, view)

    segments = {
        name: tuple(op.with_views(over) for op in ops)
        for name, ops in program.segments.items()
        if name != "trunk"
    }
    ends = tuple(op.with_views(over) for op in trunk[last.end :])
    return pruned(
        replace(program, name=f"{program.name}, first {num} of {total} layers"),
        {"trunk": trunk[: kept.end] + ends, **segments},
        {name: over(view) for name, view in program.outputs.items()},
    )


def layer_spans(program: Program) -> list[LayerSpan]:
    """Return the operations of each layer. What lies between layers reads no weights."""
    trunk = program.segments["trunk"]
    spans: dict[int, LayerSpan] = {}
    for at, op in enumerate(trunk):
        for name in op.weights:
            if found := _OF_LAYER.match(name):
                begin = spans[layer].begin if (layer := int(found[1])) in spans else at
                spans[layer] = LayerSpan(begin, at + 1)
    ordered = [spans[layer] for layer in sorted(spans)]
    firsts, ends = ordered[1:], ordered[:-1]
    is_split = all(one.end <= after.begin for one, after in zip(ends, firsts, strict=True))
    starts = program.layer_starts
    if len(ordered) != len(starts) or not is_split:
        raise ValueError(
            f"{program.name}: its {len(starts)} layers are not separable: operations with weights "
            f"of {len(ordered)} layers, {'one after the other' if is_split else 'interleaved'}"
        )
    if any(not s.begin < at < s.end for s, at in zip(ordered, starts, strict=True)):
        raise ValueError(f"{program.name}: a layer has its attention outside its weights")
    return ordered


def _moved_views(program: Program, kept: tuple[Op, ...], last: tuple[Op, ...]) -> dict[View, View]:
    """Return which view of the `kept` layer is in the place of each of the `last` layer's own."""
    moved: dict[View, View] = {}
    for ours, theirs in zip(reversed(kept), reversed(last), strict=False):
        for here, there in zip(ours.outputs, theirs.outputs, strict=False):
            if here.width == there.width and _alike(here.buffer, there.buffer):
                moved.setdefault(there, here)
    own = {view.buffer.index for op in last for view in op.outputs}
    own -= {view.buffer.index for op in kept for view in op.outputs}
    after = program.segments["trunk"][-1:] + program.segments["head"]
    for view in (view for op in after for view in op.inputs):
        if view.buffer.index in own and view not in moved:
            raise ValueError(
                f"{program.name}: {view}, which the last layer computes, has no equal in a layer "
                "before it"
            )
    return moved


def _alike(one: Buffer, other: Buffer) -> bool:
    return (one.rows, one.width) == (other.rows, other.width)


def pruned(
    program: Program, segments: dict[str, tuple[Op, ...]], outputs: dict[str, View]
) -> Program:
    """Return the program without the weights, buffers and cache layers that nothing uses."""
    ops = [op for each in segments.values() for op in each]
    used = {view.buffer.index for op in ops for view in (*op.inputs, *op.outputs)}
    buffers: dict[int, Buffer] = {
        old: replace(program.buffers[old], index=new) for new, old in enumerate(sorted(used))
    }

    def over(view: View) -> View:
        return replace(view, buffer=buffers[view.buffer.index])

    names = {name for op in ops for name in op.weights}
    layers = [0] * len(program.caches)
    for op in ops:
        if isinstance(op, (StoreKV, Attention)):
            layers[op.cache] = max(layers[op.cache], op.layer + 1)
    return replace(
        program,
        buffers=tuple(buffers.values()),
        segments={
            name: tuple(op.with_views(over) for op in each) for name, each in segments.items()
        },
        weights={name: weight for name, weight in program.weights.items() if name in names},
        caches=tuple(
            replace(cache, layers=num) for cache, num in zip(program.caches, layers, strict=True)
        ),
        outputs={name: over(view) for name, view in outputs.items()},
    )
