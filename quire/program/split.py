"""split: the programs of a pipeline's stages, each with some consecutive layers. A rewrite; loads
nothing.

    first, last = split(program, 2)

The embedding is in the first stage; the last norm, the head and all other segments are in the last.
A stage ends with a Send for each view that later stages read, and the next one begins with the Recv
of it: the residual stream, after a pending sum has been added to it. A head that is also the
embedding is a weight of both stages. Hidden states that are outputs (taps.py) are sent on to the
last stage. Stages are balanced by the bytes of weights that a step reads: tables that are only
gathered from do not count.

Always holds: the operations of all stages, in order, are those of the whole program but for a sum
that is added before it is sent instead of after, which rounds alike; so all bits are those of one
process. Layers of a stage's KV cache count from 0. Refused by name: more stages than layers, and
layers that are not separable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from quire.base.errors import SettingError
from quire.program.first_layers import first_layers, layer_spans, num_layers, pruned
from quire.program.ops import Add, Attention, Embed, Norm, Op, StoreKV
from quire.program.program import Program
from quire.program.stage_ops import Recv, Send
from quire.program.taps import TAPS
from quire.program.tensors import View

MAX_STAGES = 64


def split(program: Program, stages: int) -> tuple[Program, ...]:
    """Return the program of each stage; the program itself for one stage.

    Raises SettingError with the numbers of stages that work where this one does not.
    """
    check_stages(program, stages)
    if stages == 1:
        return (program,)
    return _divided(program, layers_of_stages(program, stages))


def split_first_layers(program: Program, num: int, stages: int) -> tuple[Program, ...]:
    """Return the programs of stages for the first `num` layers of a program (first_layers.py).

    Each layer is in the stage that has it of the whole program, so that it has the same weights and
    the same cache there. A stage after the last of them hands the stream on; the last has the head.
    """
    short = first_layers(program, num)
    return (short,) if stages == 1 else _divided(short, layers_of_stages(program, stages))


def _divided(program: Program, counts: Sequence[int]) -> tuple[Program, ...]:
    """Return the programs of stages with so many layers each, as far as the program has layers."""
    spans, stages = layer_spans(program), len(counts)
    firsts = [sum(counts[:stage]) for stage in range(stages)]
    begins = [*(span.begin for span in spans), spans[-1].end]
    of_stages = [begins[min(first, len(spans))] for first in firsts[1:]]
    cuts = [0, *of_stages, len(program.segments["trunk"])]
    trunks = [list(program.segments["trunk"][a:b]) for a, b in pairwise(cuts)]
    for before, after in pairwise(trunks):
        _add_before(before, after)
    sent = _sent(program, trunks)
    made = []
    for stage, trunk in enumerate(trunks):
        received: list[Op] = [Recv(y=view, stage=stage - 1) for view in sent[stage]]
        passed: list[Op] = [Send(x=view, stage=stage + 1) for view in sent[stage + 1]]
        ops = received + [_counted_from(op, firsts[stage]) for op in trunk] + passed
        made.append(_stage(program, stage, stages, tuple(ops)))
    return tuple(made)


def check_stages(program: Program, stages: int) -> None:
    """Raise SettingError unless the program can be split into so many stages."""
    total = num_layers(program)
    if not 1 <= stages <= min(total, MAX_STAGES):
        raise SettingError(
            f"pipeline_parallel_size is {stages}; {program.name} has {total} layers, of which each "
            f"stage needs one: 1 to {min(total, MAX_STAGES)} are allowed"
        )
    if stages == 1:
        return
    try:
        layer_spans(program)
    except ValueError as error:
        raise SettingError(
            f"pipeline_parallel_size is {stages}, and layers cannot be divided over stages: "
            f"{error}; leave it out"
        ) from error


def layers_of_stages(program: Program, stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has: the heaviest stage is as light as possible."""
    spans, trunk = layer_spans(program), program.segments["trunk"]
    edges = [0, *(span.begin for span in spans[1:]), len(trunk)]
    loads = [_read_bytes(program, trunk[a:b]) for a, b in pairwise(edges)]
    loads[-1] += _read_bytes(program, program.segments.get("head", ()))
    return _balanced(tuple(loads), stages)


def _read_bytes(program: Program, ops: Sequence[Op]) -> int:
    """Return bytes of weights that a step reads whole."""
    names = {name for op in ops if not isinstance(op, Embed) for name in op.weights}
    return sum(program.weights[name].num_bytes for name in names)


@lru_cache(maxsize=64)
def _balanced(loads: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Divide a row of loads into `stages` runs. The heaviest run is as light as possible; of such
    divisions, that with the least sum of squares."""
    sums = [0]
    for load in loads:
        sums.append(sums[-1] + load)

    def best(limit: float, *, is_squared: bool) -> tuple[float, tuple[int, ...]]:
        """Return the least cost of runs of at most `limit`: the heaviest run, or the sum of
        squares."""
        none: tuple[float, tuple[int, ...]] = (float("inf"), ())
        found = [none] * (len(loads) + 1)  # of the first n loads, over the stages so far
        found[0] = (0, ())
        for _ in range(stages):
            following = [none] * (len(loads) + 1)
            for end in range(1, len(loads) + 1):
                for begin in range(end):
                    cost, counts = found[begin]
                    load = sums[end] - sums[begin]
                    if cost == float("inf") or load > limit:
                        continue
                    total = cost + load * load if is_squared else max(cost, load)
                    if total < following[end][0]:
                        following[end] = (total, (*counts, end - begin))
            found = following
        return found[-1]

    heaviest, _ = best(float("inf"), is_squared=False)
    return best(heaviest, is_squared=True)[1]


def _add_before(before: list[Op], after: list[Op]) -> None:
    """Where a stage begins with a norm that first adds what the layer before has left, add that at
    the end of the stage before, so that the stream alone is sent."""
    first = after[0] if after else None
    if not isinstance(first, Norm) or first.delta is None:
        return
    delta = first.delta.buffer.index
    if any(view.buffer.index == delta for op in after[1:] for view in op.inputs):
        return
    before.append(Add(x=first.x, y=first.delta))
    after[0] = replace(first, delta=None)


def _sent(program: Program, trunks: list[list[Op]]) -> list[list[View]]:
    """Return the views that each stage receives: written before it, and read in it or later. Taps
    of layers are outputs of the last stage."""
    rest = [op for name, ops in program.segments.items() if name != "trunk" for op in ops]
    taps = program.outputs.get(TAPS)
    sent: list[list[View]] = [[]]
    for stage in range(1, len(trunks)):
        before = [view for trunk in trunks[:stage] for op in trunk for view in op.outputs]
        later = [op for trunk in trunks[stage:] for op in trunk]
        tapped = [view for view in before if taps is not None and view.buffer == taps.buffer]
        sent.append(_live(later + rest, {view.buffer.index for view in before}) + tapped)
    return [*sent, []]


def _live(ops: Sequence[Op], written: set[int]) -> list[View]:
    """Return what `ops` read of the buffers `written`, before they write it themselves."""
    live: dict[int, View] = {}
    own: set[int] = set()
    for op in ops:
        for view in op.inputs:
            if (index := view.buffer.index) in written and index not in own:
                live[index] = View(view.buffer, 0, view.buffer.width)
        own.update(v.buffer.index for v in op.outputs if v not in op.inputs and _fills(v))
    return [live[index] for index in sorted(live)]


def _fills(view: View) -> bool:
    return view.offset == 0 and view.width == view.buffer.width


def _counted_from(op: Op, first: int) -> Op:
    """Return an operation with its layer of the cache counted from the stage's first."""
    if isinstance(op, StoreKV | Attention):
        return replace(op, layer=op.layer - first)
    return op


def _stage(program: Program, stage: int, stages: int, trunk: tuple[Op, ...]) -> Program:
    is_last = stage == stages - 1
    segments = {name: ops for name, ops in program.segments.items() if is_last or name == "trunk"}
    return pruned(
        replace(program, name=f"{program.name}, stage {stage} of {stages}", is_part=True),
        segments | {"trunk": trunk},
        dict(program.outputs) if is_last else {},
    )
