"""Which kernels an operation is, on a GPU (or, to prove it without one, in Triton's interpreter).

Each operation becomes a call on tensors at fixed addresses, as in ops.py, and some that follow one
another become one (fused.py). Products are in products.py; what has no kernel yet is plain PyTorch
on the device. Always holds: a call launches the same kernels for the same counts, in steps that all
keep taps or all keep none, and asks nothing of the device, so calls can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from quire.execute.gpu.attention_steps import AttentionSteps
from quire.execute.gpu.context_steps import ContextSteps
from quire.execute.gpu.expert_kernels import ExpertScratch, bind_experts, bind_route
from quire.execute.gpu.fused import BytesToProduct, HeadsToCache, launches
from quire.execute.gpu.kernels import activation as activation_kernels
from quire.execute.gpu.kernels import attention as attention_kernels
from quire.execute.gpu.kernels import norm as norm_kernels
from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels import store_kv as head_kernels
from quire.execute.gpu.kernels.byte_rows import ByteRows
from quire.execute.gpu.ops import bind_feed, products_of
from quire.execute.gpu.place import Call, Place, num_rows
from quire.execute.gpu.products import Products
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
from quire.program.program import Program
from quire.program.stage_ops import Recv, Send


@dataclass(frozen=True, slots=True)
class KernelOps:
    """Binds operations to kernels."""

    place: Place
    attention: AttentionSteps
    products: Products
    experts: ExpertScratch
    context: ContextSteps

    def bind_segment(self, segment: str) -> list[Call]:
        """Return a segment's operations as launches, some of them together."""
        return [self._bind(step) for step in launches(self.place.program, segment)]

    def _bind(self, step: Op | HeadsToCache | BytesToProduct) -> Call:
        match step:
            case HeadsToCache():
                return self._heads(step)
            case BytesToProduct():
                return self._bytes_to_product(step)
            case Embed():
                return partial(_embed, self, step)
            case Norm():
                return partial(_norm, self, step)
            case Linear():
                return self.products.bind(step)
            case Rope():
                return partial(_rope, self, step)
            case StoreKV():
                return partial(_store_kv, self, step)
            case Attention() if step.degree > 1:
                exchange_of(step, self.place.ends)
                return partial(self.context.attend, step)
            case Attention():
                return partial(_attention, self, step)
            case Activation():
                return partial(_activation, self, step)
            case Add():
                return partial(_add, self, step)
            case Scale():
                return partial(_scale, self, step)
            case SoftCap():
                return partial(_soft_cap, self, step)
            case Copy():
                return partial(_copy, self, step)
            case Tap():
                return partial(_tap, self, step)
            case GatherRows():
                return partial(_gather_rows, self, step)
            case AllGather() | AllReduce() | Send() | Recv():
                return bind_rank_op(step, self.place)
            case Feed():
                return bind_feed(step, self.place)
            case Route():
                return bind_route(step, self.place)
            case Experts():
                return bind_experts(step, self.place, self.experts)
            case _:
                assert_never(step)

    def _bytes_to_product(self, step: BytesToProduct) -> Call:
        rows_of = step.product.x.buffer.rows
        room, product = self.products.room(step.product), self.products.by_bytes(step.product)

        make: Callable[..., None]
        if isinstance(step.maker, Norm):
            make = partial(_norm, self, step.maker)
        else:
            make = partial(_activation, self, step.maker)

        def call(counts: Counts) -> None:
            make(counts, out=room, stores_y=step.is_read)
            product(room.first(num_rows(rows_of, counts)), counts)

        return call

    def _heads(self, heads: HeadsToCache) -> Call:
        place, norm = self.place, None
        if heads.norms is not None:
            q_weight, k_weight = (place.weights.plain[name] for name in heads.norms)
            norm = head_kernels.HeadNorm(q_weight, k_weight, heads.eps)

        def call(counts: Counts) -> None:
            angles = None
            if heads.rope is not None:
                positions = place.step.rope_positions[: counts.tokens]
                angles = head_kernels.Angles(*place.ropes[heads.rope], positions)
            head_kernels.prepare_heads(
                place.of(heads.q, counts),
                place.of(heads.k, counts),
                place.of(heads.v, counts),
                place.pool().layer(heads.layer),
                place.step.kv_slots[: counts.tokens],
                angles=angles,
                norm=norm,
            )

        return call


def products_of_launches(program: Program, segment: str) -> list[str | None]:
    """Return the weight of each launch that has a product, None for the others."""
    steps = launches(program, segment)
    return products_of(
        [step.product if isinstance(step, BytesToProduct) else step for step in steps]
    )


def _embed(ops: KernelOps, op: Embed, counts: Counts) -> None:
    step, weights = ops.place.step, ops.place.weights
    ids = step.token_ids if op.ids is IdSource.TOKENS else step.rope_positions
    ids, y = ids[: counts.tokens], ops.place.of(op.y, counts)
    held = weights.few.get(op.weight)
    if held is None:
        row_kernels.gather_rows(weights.plain[op.weight], ids, y)
    else:
        row_kernels.gather_rows(held.values[:, : y.shape[1]], ids, y, scales=held.scales)


def _norm(
    ops: KernelOps,
    op: Norm,
    counts: Counts,
    *,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    place = ops.place
    norm_kernels.norm(
        place.of(op.x, counts),
        place.of(op.y, counts),
        weight=place.vector(op.weight),
        bias=place.vector(op.bias),
        delta=None if op.delta is None else place.of(op.delta, counts),
        eps=op.eps,
        form=op.form,
        group=op.group,
        out=out,
        stores_y=stores_y,
    )


def _rope(ops: KernelOps, op: Rope, counts: Counts) -> None:
    cos, sin = ops.place.ropes[op.rope]
    angles = head_kernels.Angles(cos, sin, ops.place.step.rope_positions[: counts.tokens])
    head_kernels.rope(ops.place.of(op.x, counts), angles, head_dim=op.head_dim)


def _store_kv(ops: KernelOps, op: StoreKV, counts: Counts) -> None:
    k, v = ops.place.of(op.k, counts), ops.place.of(op.v, counts)
    cache = ops.place.pool().layer(op.layer)
    head_kernels.store_kv(k, v, cache, ops.place.step.kv_slots[: counts.tokens])


def _attention(ops: KernelOps, op: Attention, counts: Counts) -> None:
    place, step = ops.place, ops.place.step
    for tiles in ops.attention.tiles(op.heads // op.kv_heads):
        attention_kernels.attention(
            place.of(op.q, counts),
            place.pool().layer(op.layer),
            place.of(op.y, counts),
            tiles=tiles,
            positions=step.positions[: counts.tokens],
            tables=step.block_tables,
            scale=op.scale,
            window=op.window,
            soft_cap=op.soft_cap,
        )


def _activation(
    ops: KernelOps,
    op: Activation,
    counts: Counts,
    *,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    gate = ops.place.of(op.gate, counts)
    up = None if op.up is None else ops.place.of(op.up, counts)
    y = ops.place.of(op.y, counts)
    activation_kernels.activation(gate, up, y, form=op.form, out=out, stores_y=stores_y)


def _add(ops: KernelOps, op: Add, counts: Counts) -> None:
    row_kernels.add(ops.place.of(op.x, counts), ops.place.of(op.y, counts))


def _scale(ops: KernelOps, op: Scale, counts: Counts) -> None:
    row_kernels.scale(ops.place.of(op.x, counts), op.factor)


def _soft_cap(ops: KernelOps, op: SoftCap, counts: Counts) -> None:
    row_kernels.soft_cap(ops.place.of(op.x, counts), op.cap)


def _copy(ops: KernelOps, op: Copy | Tap, counts: Counts) -> None:
    row_kernels.copy(ops.place.of(op.x, counts), ops.place.of(op.y, counts))


def _tap(ops: KernelOps, op: Tap, counts: Counts) -> None:
    if counts.batch.keeps_taps:
        _copy(ops, op, counts)


def _gather_rows(ops: KernelOps, op: GatherRows, counts: Counts) -> None:
    x, y = ops.place.of(op.x, counts), ops.place.of(op.y, counts)
    row_kernels.gather_rows(x, ops.place.step.sample_rows[: counts.samples], y)
