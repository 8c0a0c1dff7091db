"""Hidden states of a program as outputs: the stream after chosen layers, and what the head reads.

    Rewrite           Output       Rows               Hidden state
    with_taps         taps         all token rows     the residual stream after each of some layers,
                      [T, n * H]                      side by side, in f32; the last layer's is that
                                                      before the final norm
    with_head_input   head_input   rows that sample   what the product onto the vocabulary reads,
                      [S, H]                          after the final norm, in the program's dtype

    with_taps(program, (2, 16, 29)).outputs["taps"]
    with_head_input(program).outputs["head_input"]

The normed stream of all token rows is not among them. Rewrites; they load nothing. A Tap follows
the operation that completes the stream of a layer; steps of which no tap is read leave it out
(ForwardBatch.keeps_taps). What the head reads is only named. No other operation changes, so a
tapped program gives the same answers in every bit. Knows no reader of the taps. Always holds: layer
i is what lies from attention i to the next attention's inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.program.ops import Attention, Linear, Op, Tap
from quire.program.program import Program
from quire.program.tensors import Buffer, DType, Rows, View

TAPS, HEAD_INPUT = "taps", "head_input"


def num_layers_of(program: Program) -> int:
    """Return the layers that can be tapped."""
    return len(program.layer_starts)


def with_taps(program: Program, layers: Sequence[int]) -> Program:
    """Return the program with an output "taps": the stream after each of `layers`, side by side.

    Raises ValueError for layers that the program lacks or names twice, and where layers
    do not add to one stream.
    """
    num_layers = num_layers_of(program)
    if not layers or len(set(layers)) != len(layers) or not set(layers) <= set(range(num_layers)):
        raise ValueError(
            f"layers {list(layers)} cannot be tapped; {program.name} has the layers 0 to "
            f"{num_layers - 1}, and each may be given once"
        )
    hidden = program.outputs["hidden"]
    places = [_completed_at(program, hidden, layer) for layer in layers]
    index, width = len(program.buffers), len(layers) * hidden.width
    buffer = Buffer(index, f"{TAPS}.{index}", Rows.TOKENS, width, DType.F32)
    taps: dict[int, list[Op]] = {}
    for number, place in enumerate(places):
        y = View(buffer, number * hidden.width, hidden.width)
        taps.setdefault(place, []).append(Tap(x=hidden, y=y))
    trunk: list[Op] = []
    for place, op in enumerate(program.segments["trunk"]):
        trunk += [op, *taps.get(place, ())]
    return replace(
        program,
        buffers=(*program.buffers, buffer),
        segments={**program.segments, "trunk": tuple(trunk)},
        outputs={**program.outputs, TAPS: View(buffer, 0, width)},
    )


def with_head_input(program: Program) -> Program:
    """Return the program with an output "head_input": what the product onto the vocabulary reads.

    Raises ValueError where no product writes the logits.
    """
    logits = program.outputs["logits"].buffer
    for op in program.segments["head"]:
        if isinstance(op, Linear) and op.y.buffer == logits:
            return replace(program, outputs={**program.outputs, HEAD_INPUT: op.x})
    raise ValueError(f"{program.name}: no product writes the logits")


def _completed_at(program: Program, hidden: View, layer: int) -> int:
    """Return the last operation before the next layer's attention that writes the stream."""
    trunk, starts = program.segments["trunk"], program.layer_starts
    end = starts[layer + 1] if layer + 1 < len(starts) else len(trunk)
    for place in range(end - 1, starts[layer], -1):
        op = trunk[place]
        assert not isinstance(op, Attention), "a layer has one attention"
        if hidden in op.outputs:
            return place
    raise ValueError(
        f"{program.name}: layer {layer} does not add to the stream that its last layer leaves, so "
        "that its hidden state cannot be tapped"
    )
