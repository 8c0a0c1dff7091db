"""Operations bound to tensors: each becomes a call that computes it for the rows of a step.

Bound once, when the executor is made: buffers, weights and the step's numbers lie at fixed
addresses, so a call passes row counts only, and a captured graph of such calls can be replayed.
This file says what an operation means in plain PyTorch; kernel_ops.py says which kernels it is.
Always holds: arithmetic is float32, and rounding happens where an output is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never

import torch

from quire.execute.gpu import plain, plain_attention
from quire.execute.gpu.expert_ops import bind_experts, bind_route
from quire.execute.gpu.fused import HeadsToCache
from quire.execute.gpu.load import TORCH_TYPES, Fp8Weight, IntWeight
from quire.execute.gpu.place import Call, Place
from quire.execute.gpu.plain_context import context_attention
from quire.execute.gpu.rank_ops import bind_rank_op, exchange_of
from quire.execute.gpu.step_buffers import Counts
from quire.program.comm_ops import AllGather, AllReduce
from quire.program.expert_ops import Experts, Route
from quire.program.forms import IdSource
from quire.program.ops import (
    Activation,
    Add,
    Attention,
    Copy,
    Embed,
    Feed,
    GatherRows,
    Linear,
    Norm,
    Op,
    Rope,
    Scale,
    SoftCap,
    StoreKV,
    Tap,
)
from quire.program.stage_ops import Recv, Send


def bind_plain(segment: str, place: Place) -> list[Call]:
    """Return a segment's operations in plain PyTorch."""
    ops = place.program.segments.get(segment, ())
    return [_bound(op, place) for op in ops]


def bind_feed(op: Feed, place: Place) -> Call:
    """Return the call that takes the features of a batch."""

    def call(counts: Counts) -> None:
        read, shape = counts.batch.features, (counts.tokens, op.y.width)
        if read is None or read.shape != shape:
            found = None if read is None else list(read.shape)
            raise ValueError(f"features are {found}; {list(shape)} are read")
        place.of(op.y, counts).copy_(torch.from_numpy(read))

    return call


def products_of(ops: Sequence[Op | HeadsToCache]) -> list[str | None]:
    """Return the weight of each operation that is a product, of a mixture the first of its two,
    None for the others."""
    return [
        op.weight if isinstance(op, Linear) else (op.gate_up if isinstance(op, Experts) else None)
        for op in ops
    ]


def _bound(op: Op, place: Place) -> Call:
    match op:
        case Embed():
            return partial(_embed, op, place)
        case Norm():
            return partial(_norm, op, place)
        case Linear():
            return partial(_linear, op, place)
        case Rope():
            return partial(_rope, op, place)
        case StoreKV():
            return partial(_store_kv, op, place)
        case Attention():
            if op.degree > 1:
                exchange_of(op, place.ends)
            return partial(_attention, op, place)
        case Activation():
            return partial(_activation, op, place)
        case Add():
            return partial(_add, op, place)
        case Scale():
            return partial(_scale, op, place)
        case SoftCap():
            return partial(_soft_cap, op, place)
        case Copy():
            return partial(_copy, op, place)
        case Tap():
            return partial(_tap, op, place)
        case GatherRows():
            return partial(_gather_rows, op, place)
        case AllGather() | AllReduce() | Send() | Recv():
            return bind_rank_op(op, place)
        case Route():
            return bind_route(op, place)
        case Experts():
            return bind_experts(op, place)
        case Feed():
            return bind_feed(op, place)
        case _:
            assert_never(op)


def _embed(op: Embed, place: Place, counts: Counts) -> None:
    step = place.step
    ids = step.token_ids if op.ids is IdSource.TOKENS else step.rope_positions
    ids = ids[: counts.tokens].long()
    weight = place.weights.few.get(op.weight)
    rows = weight.rows(ids) if weight is not None else place.weights.plain[op.weight][ids]
    place.of(op.y, counts).copy_(rows)


def _norm(op: Norm, place: Place, counts: Counts) -> None:
    x = place.of(op.x, counts)
    if op.delta is not None:
        x.copy_(x.float() + place.of(op.delta, counts).float())
    y = plain.norm(
        x,
        place.vector(op.weight),
        place.vector(op.bias),
        eps=op.eps,
        form=op.form,
        group=op.group,
    )
    place.of(op.y, counts).copy_(y)


def _linear(op: Linear, place: Place, counts: Counts) -> None:
    x, bias = place.of(op.x, counts), place.vector(op.bias)
    weight: IntWeight | Fp8Weight | None = place.weights.few.get(op.weight)
    if isinstance(weight, Fp8Weight):
        y = plain.fp8_linear(
            x,
            weight.values,
            weight.scales,
            weight.scheme,
            bias,
            input_scale=weight.input_scale,
            exact=place.exact,
        )
    elif weight is not None:
        y = plain.int_linear(x, weight.values, weight.scales, weight.scheme, bias)
    else:
        y = plain.linear(x, place.weights.plain[op.weight], bias, exact=place.exact)
    place.of(op.y, counts).copy_(y)


def _rope(op: Rope, place: Place, counts: Counts) -> None:
    x = place.of(op.x, counts)
    cos, sin = place.ropes[op.rope]
    at = place.step.rope_positions[: counts.tokens].long()
    x.copy_(plain.rope(x, cos[at], sin[at], heads=op.heads, head_dim=op.head_dim))


def _store_kv(op: StoreKV, place: Place, counts: Counts) -> None:
    plain_attention.store(
        place.pool().layer(op.layer),
        place.of(op.k, counts),
        place.of(op.v, counts),
        place.step.kv_slots[: counts.tokens],
        dtype=TORCH_TYPES[place.program.caches[0].dtype],
    )


def _attention(op: Attention, place: Place, counts: Counts) -> None:
    q, cache = place.of(op.q, counts), place.pool().layer(op.layer)
    of_rows: dict[str, Any] = {
        "seq_starts": counts.batch.seq_starts.tolist(),
        "positions": counts.batch.positions.tolist(),
        "block_tables": place.step.block_tables,
        "heads": op.heads,
        "scale": op.scale,
        "window": op.window,
        "soft_cap": op.soft_cap,
        "dtype": TORCH_TYPES[place.program.caches[0].dtype],
    }
    if op.degree > 1:
        y = context_attention(op, q, cache, exchange_of(op, place.ends), **of_rows)
    else:
        y = plain_attention.attention(q, cache, **of_rows)
    place.of(op.y, counts).copy_(y)


def _activation(op: Activation, place: Place, counts: Counts) -> None:
    gate = place.of(op.gate, counts)
    up = None if op.up is None else place.of(op.up, counts)
    y = plain.activation(gate, up, form=op.form)
    place.of(op.y, counts).copy_(y)


def _add(op: Add, place: Place, counts: Counts) -> None:
    x = place.of(op.x, counts)
    x.copy_(x.float() + place.of(op.y, counts).float())


def _scale(op: Scale, place: Place, counts: Counts) -> None:
    x = place.of(op.x, counts)
    factor = torch.tensor(op.factor, dtype=torch.float32, device=x.device)
    x.copy_(x.float() * factor)


def _soft_cap(op: SoftCap, place: Place, counts: Counts) -> None:
    x = place.of(op.x, counts)
    x.copy_(plain.soft_cap(x, op.cap))


def _copy(op: Copy | Tap, place: Place, counts: Counts) -> None:
    place.of(op.y, counts).copy_(place.of(op.x, counts))


def _tap(op: Tap, place: Place, counts: Counts) -> None:
    if counts.batch.keeps_taps:
        _copy(op, place, counts)


def _gather_rows(op: GatherRows, place: Place, counts: Counts) -> None:
    rows = place.step.sample_rows[: counts.samples].long()
    place.of(op.y, counts).copy_(place.of(op.x, counts)[rows])
