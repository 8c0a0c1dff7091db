"""Which kernels an operation is, on a GPU (or, to prove it without one, in Triton's interpreter).

Each operation becomes a call on tensors at fixed addresses, as in ops.py, and some that follow one
another become one (fused.py). Products are in products.py; what has no kernel yet is plain PyTorch
on the device. Always holds: a call launches the same kernels for the same counts, and asks nothing
of the device, so calls can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.execute.gpu.attention_steps import AttentionSteps
from quire.execute.gpu.fused import BytesToProduct, HeadsToCache, launches
from quire.execute.gpu.kernels import activation as activation_kernels
from quire.execute.gpu.kernels import attention as attention_kernels
from quire.execute.gpu.kernels import norm as norm_kernels
from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels import store_kv as head_kernels
from quire.execute.gpu.kernels.byte_rows import ByteRows
from quire.execute.gpu.ops import Call, Place, num_rows
from quire.execute.gpu.products import Products
from quire.execute.gpu.step_buffers import Counts
from quire.program.ops import Op, OpKind


@dataclass(frozen=True, slots=True)
class KernelOps:
    """Binds operations to kernels."""

    place: Place
    attention: AttentionSteps
    products: Products

    def bind_segment(self, segment: str) -> list[Call]:
        """A segment's operations as launches, some of them together."""
        return [self._bind(step) for step in launches(self.place.program, segment)]

    def _bind(self, step: Op | HeadsToCache | BytesToProduct) -> Call:
        if isinstance(step, HeadsToCache):
            return self._heads(step)
        if isinstance(step, BytesToProduct):
            return self._bytes_to_product(step)
        if step.kind is OpKind.LINEAR:
            return self.products.bind(step)
        launch = LAUNCHES[step.kind]
        return lambda counts: launch(self, step, counts)

    def _bytes_to_product(self, step: BytesToProduct) -> Call:
        make, rows_of = MAKERS[step.maker.kind], step.product.inputs[0].buffer.rows
        room, product = self.products.room(step.product), self.products.by_bytes(step.product)

        def call(counts: Counts) -> None:
            make(self, step.maker, counts, out=room, stores_y=step.is_read)
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


def _embed(ops: KernelOps, op: Op, counts: Counts) -> None:
    step, weights = ops.place.step, ops.place.weights
    ids = step.token_ids if op.attrs["ids"] == "tokens" else step.rope_positions
    ids, y = ids[: counts.tokens], ops.place.of(op.outputs[0], counts)
    held = weights.few.get(op.attrs["weight"])
    if held is None:
        row_kernels.gather_rows(weights.plain[op.attrs["weight"]], ids, y)
    else:
        row_kernels.gather_rows(held.values[:, : y.shape[1]], ids, y, scales=held.scales)


def _norm(
    ops: KernelOps,
    op: Op,
    counts: Counts,
    *,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    place = ops.place
    norm_kernels.norm(
        place.of(op.inputs[0], counts),
        place.of(op.outputs[0], counts),
        weight=place.vector(op.attrs["weight"]),
        bias=place.vector(op.attrs["bias"]),
        delta=place.of(op.inputs[1], counts) if len(op.inputs) == 2 else None,
        eps=op.attrs["eps"],
        form=op.attrs["form"],
        group=op.attrs["group"],
        out=out,
        stores_y=stores_y,
    )


def _rope(ops: KernelOps, op: Op, counts: Counts) -> None:
    cos, sin = ops.place.ropes[op.attrs["rope"]]
    angles = head_kernels.Angles(cos, sin, ops.place.step.rope_positions[: counts.tokens])
    head_kernels.rope(ops.place.of(op.inputs[0], counts), angles, head_dim=op.attrs["head_dim"])


def _store_kv(ops: KernelOps, op: Op, counts: Counts) -> None:
    k, v = (ops.place.of(view, counts) for view in op.inputs)
    cache = ops.place.pool().layer(op.attrs["layer"])
    head_kernels.store_kv(k, v, cache, ops.place.step.kv_slots[: counts.tokens])


def _attention(ops: KernelOps, op: Op, counts: Counts) -> None:
    place, step = ops.place, ops.place.step
    for tiles in ops.attention.tiles(op.attrs["heads"] // op.attrs["kv_heads"]):
        attention_kernels.attention(
            place.of(op.inputs[0], counts),
            place.pool().layer(op.attrs["layer"]),
            place.of(op.outputs[0], counts),
            tiles=tiles,
            positions=step.positions[: counts.tokens],
            tables=step.block_tables,
            scale=op.attrs["scale"],
            window=op.attrs["window"],
            soft_cap=op.attrs["soft_cap"],
        )


def _activation(
    ops: KernelOps,
    op: Op,
    counts: Counts,
    *,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    gate = ops.place.of(op.inputs[0], counts)
    up = ops.place.of(op.inputs[1], counts) if len(op.inputs) == 2 else None
    y = ops.place.of(op.outputs[0], counts)
    form = op.attrs["form"]
    activation_kernels.activation(gate, up, y, form=form, out=out, stores_y=stores_y)


def _add(ops: KernelOps, op: Op, counts: Counts) -> None:
    row_kernels.add(ops.place.of(op.inputs[0], counts), ops.place.of(op.inputs[1], counts))


def _scale(ops: KernelOps, op: Op, counts: Counts) -> None:
    row_kernels.scale(ops.place.of(op.inputs[0], counts), op.attrs["factor"])


def _soft_cap(ops: KernelOps, op: Op, counts: Counts) -> None:
    row_kernels.soft_cap(ops.place.of(op.inputs[0], counts), op.attrs["cap"])


def _copy(ops: KernelOps, op: Op, counts: Counts) -> None:
    row_kernels.copy(ops.place.of(op.inputs[0], counts), ops.place.of(op.outputs[0], counts))


def _gather_rows(ops: KernelOps, op: Op, counts: Counts) -> None:
    x, y = ops.place.of(op.inputs[0], counts), ops.place.of(op.outputs[0], counts)
    row_kernels.gather_rows(x, ops.place.step.sample_rows[: counts.samples], y)


LAUNCHES: Mapping[OpKind, Callable[[KernelOps, Op, Counts], None]] = {
    OpKind.EMBED: _embed,
    OpKind.NORM: _norm,
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
# Those that make rows in bytes too.
MAKERS: Mapping[OpKind, Callable[..., None]] = {OpKind.NORM: _norm, OpKind.ACTIVATION: _activation}
