"""Operations bound to tensors: each becomes a call that computes it for the rows of a step.

Bound once, when the executor is made: buffers, weights and the step's numbers lie at fixed
addresses, so a call passes row counts only, and a captured graph of such calls can be replayed.
This file says what an operation means in plain PyTorch; kernel_ops.py says which kernels it is.
Always holds: arithmetic is float32, and rounding happens where an output is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.execute.gpu import plain, plain_attention
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.load import TORCH_TYPES, Fp8Weight, IntWeight, Loaded
from quire.execute.gpu.step_buffers import Counts, StepBuffers
from quire.program.ops import Op, OpKind, Rows, View
from quire.program.program import Program

Call = Callable[[Counts], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """All that operations read and write. buffers: [max rows, width] by index. ropes: cosines and
    sines [positions, half]. pool: set when the cache is made, after that never another."""

    program: Program
    buffers: Sequence[Tensor]
    weights: Loaded
    ropes: Sequence[tuple[Tensor, Tensor]]
    step: StepBuffers
    pool: Callable[[], CachePool]
    exact: bool

    def of(self, view: View, counts: Counts) -> Tensor:
        """The view's rows of this step."""
        rows = num_rows(view.buffer.rows, counts)
        return self.buffers[view.buffer.index][:rows, view.offset : view.offset + view.width]

    def vector(self, name: str | None) -> Tensor | None:
        """A weight that may not be there."""
        return None if name is None else self.weights.plain[name]


def num_rows(rows: Rows, counts: Counts) -> int:
    """How many a step has of what a buffer's rows are."""
    return {
        Rows.TOKENS: counts.tokens,
        Rows.SEQUENCES: counts.sequences,
        Rows.SAMPLES: counts.samples,
    }[rows]


def bind_plain(segment: str, place: Place) -> list[Call]:
    """A segment's operations in plain PyTorch."""
    ops = place.program.segments.get(segment, ())
    return [partial(PLAIN[op.kind], op, place) for op in ops]


def _embed(op: Op, place: Place, counts: Counts) -> None:
    name, step = op.attrs["weight"], place.step
    ids = step.token_ids if op.attrs["ids"] == "tokens" else step.rope_positions
    ids = ids[: counts.tokens].long()
    weight = place.weights.few.get(name)
    rows = weight.rows(ids) if weight is not None else place.weights.plain[name][ids]
    place.of(op.outputs[0], counts).copy_(rows)


def _norm(op: Op, place: Place, counts: Counts) -> None:
    x = place.of(op.inputs[0], counts)
    if len(op.inputs) == 2:
        x.copy_(x.float() + place.of(op.inputs[1], counts).float())
    y = plain.norm(
        x,
        place.vector(op.attrs["weight"]),
        place.vector(op.attrs["bias"]),
        eps=op.attrs["eps"],
        form=op.attrs["form"],
        group=op.attrs["group"],
        by_row=place.exact,
    )
    place.of(op.outputs[0], counts).copy_(y)


def _linear(op: Op, place: Place, counts: Counts) -> None:
    x, bias = place.of(op.inputs[0], counts), place.vector(op.attrs["bias"])
    weight: IntWeight | Fp8Weight | None = place.weights.few.get(op.attrs["weight"])
    if isinstance(weight, Fp8Weight):
        y = plain.fp8_linear(
            x,
            weight.values,
            weight.scales,
            weight.scheme,
            bias,
            input_scale=weight.input_scale,
            by_row=place.exact,
        )
    elif weight is not None:
        y = plain.int_linear(x, weight.values, weight.scales, weight.scheme, bias)
    else:
        y = plain.linear(x, place.weights.plain[op.attrs["weight"]], bias, by_row=place.exact)
    place.of(op.outputs[0], counts).copy_(y)


def _rope(op: Op, place: Place, counts: Counts) -> None:
    x = place.of(op.inputs[0], counts)
    cos, sin = place.ropes[op.attrs["rope"]]
    at = place.step.rope_positions[: counts.tokens].long()
    heads, head_dim = op.attrs["heads"], op.attrs["head_dim"]
    x.copy_(plain.rope(x, cos[at], sin[at], heads=heads, head_dim=head_dim))


def _store_kv(op: Op, place: Place, counts: Counts) -> None:
    k, v = (place.of(view, counts) for view in op.inputs)
    plain_attention.store(
        place.pool().layer(op.attrs["layer"]),
        k,
        v,
        place.step.kv_slots[: counts.tokens],
        dtype=TORCH_TYPES[place.program.caches[0].dtype],
    )


def _attention(op: Op, place: Place, counts: Counts) -> None:
    y = plain_attention.attention(
        place.of(op.inputs[0], counts),
        place.pool().layer(op.attrs["layer"]),
        seq_starts=counts.batch.seq_starts.tolist(),
        positions=counts.batch.positions.tolist(),
        block_tables=place.step.block_tables,
        heads=op.attrs["heads"],
        scale=op.attrs["scale"],
        window=op.attrs["window"],
        soft_cap=op.attrs["soft_cap"],
        dtype=TORCH_TYPES[place.program.caches[0].dtype],
    )
    place.of(op.outputs[0], counts).copy_(y)


def _activation(op: Op, place: Place, counts: Counts) -> None:
    gate = place.of(op.inputs[0], counts)
    up = place.of(op.inputs[1], counts) if len(op.inputs) == 2 else None
    y = plain.activation(gate, up, form=op.attrs["form"], by_row=place.exact)
    place.of(op.outputs[0], counts).copy_(y)


def _add(op: Op, place: Place, counts: Counts) -> None:
    x, y = (place.of(view, counts) for view in op.inputs)
    x.copy_(x.float() + y.float())


def _scale(op: Op, place: Place, counts: Counts) -> None:
    x = place.of(op.inputs[0], counts)
    factor = torch.tensor(op.attrs["factor"], dtype=torch.float32, device=x.device)
    place.of(op.outputs[0], counts).copy_(x.float() * factor)


def _soft_cap(op: Op, place: Place, counts: Counts) -> None:
    x = place.of(op.inputs[0], counts)
    y = plain.soft_cap(x, op.attrs["cap"], by_row=place.exact)
    place.of(op.outputs[0], counts).copy_(y)


def _copy(op: Op, place: Place, counts: Counts) -> None:
    place.of(op.outputs[0], counts).copy_(place.of(op.inputs[0], counts))


def _gather_rows(op: Op, place: Place, counts: Counts) -> None:
    rows = place.step.sample_rows[: counts.samples].long()
    place.of(op.outputs[0], counts).copy_(place.of(op.inputs[0], counts)[rows])


PLAIN: Mapping[OpKind, Callable[[Op, Place, Counts], None]] = {
    OpKind.EMBED: _embed,
    OpKind.NORM: _norm,
    OpKind.LINEAR: _linear,
    OpKind.ROPE: _rope,
    OpKind.STORE_KV: _store_kv,
    OpKind.ATTENTION: _attention,
    OpKind.ACTIVATION: _activation,
    OpKind.ADD: _add,
    OpKind.SCALE: _scale,
    OpKind.SOFT_CAP: _soft_cap,
    OpKind.COPY: _copy,
    OpKind.GATHER_ROWS: _gather_rows,
}
