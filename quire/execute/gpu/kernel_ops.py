"""Which kernels an operation is, on a GPU (or, to prove it without one, in Triton's interpreter).

Each operation becomes a call on tensors at fixed addresses, as in ops.py, and some that follow one
another become one (fused.py). Products of bf16 are the vendor library's in fast mode and fixed
tiles in exact mode; what has no kernel yet is plain PyTorch on the device. Always holds: a call
launches the same kernels for the same counts, and asks nothing of the device, so calls can be
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.execute.gpu.attention_steps import AttentionSteps
from quire.execute.gpu.fused import HeadsToCache, launches
from quire.execute.gpu.kernels import activation as activation_kernels
from quire.execute.gpu.kernels import attention as attention_kernels
from quire.execute.gpu.kernels import norm as norm_kernels
from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels import store_kv as head_kernels
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.int4_layout import Int4Weight
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import (
    FEW_ROWS,
    PIECE,
    SPLIT_BELOW,
    Workspace,
    linear,
)
from quire.execute.gpu.kernels.linear_int4 import linear_int4
from quire.execute.gpu.load import Fp8Weight
from quire.execute.gpu.ops import Call, Place
from quire.execute.gpu.step_buffers import Counts
from quire.program.ops import Op, OpKind, Rows
from quire.program.program import Program
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP, Scheme

# Rows in a byte an element: their type, and whose their scales are.
ROW_FORMS: Mapping[str, tuple[torch.dtype, str]] = {
    "int8": (torch.int8, "block"),
    "fp8": (torch.float8_e4m3fn, "token"),
    "fp8-block": (torch.float8_e4m3fn, "block"),
}


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that launches share, one after the other. rows: by columns of a product and the form
    its weight wants them in, one of ROW_FORMS."""

    workspace: Workspace
    rows: Mapping[tuple[int, str], ByteRows]

    @classmethod
    def of(cls, program: Program, max_rows: Mapping[Rows, int], device: torch.device) -> Scratch:
        """Room for the largest launch of a program."""
        rows = max(max_rows[Rows.TOKENS], max_rows[Rows.SAMPLES])
        return cls(
            workspace=Workspace.of(_sums(program), device),
            rows={
                (columns, form): ByteRows.empty(
                    rows, columns, device, dtype=ROW_FORMS[form][0], scaled=ROW_FORMS[form][1]
                )
                for columns, form in _byte_rows(program)
            },
        )

    @staticmethod
    def num_bytes(program: Program, max_rows: Mapping[Rows, int]) -> int:
        """Bytes of all of it."""
        rows = max(max_rows[Rows.TOKENS], max_rows[Rows.SAMPLES])
        of_rows = sum(
            rows * -(-columns // ACTIVATION_GROUP) * (ACTIVATION_GROUP + 4)
            for columns, _ in _byte_rows(program)
        )
        return 4 * _sums(program) + of_rows


@dataclass(frozen=True, slots=True)
class KernelOps:
    """Binds operations to kernels; integer weights are packed by `pack_ints`."""

    place: Place
    attention: AttentionSteps
    scratch: Scratch

    def bind_segment(self, segment: str) -> list[Call]:
        """A segment's operations as launches, some of them together."""
        return [self._bind(step) for step in launches(self.place.program, segment)]

    def _bind(self, op: Op | HeadsToCache) -> Call:
        if isinstance(op, HeadsToCache):
            return self._heads(op)
        if op.kind is OpKind.LINEAR:
            return self._linear(op)
        launch = LAUNCHES[op.kind]
        return lambda counts: launch(self, op, counts)

    def _linear(self, op: Op) -> Call:
        place, name, view = self.place, op.attrs["weight"], op.inputs[0]
        bias = place.vector(op.attrs["bias"])
        if name in place.weights.few:
            weight, scheme = place.weights.few[name], place.program.weights[name].quantized
            assert scheme is not None, f"{name} is in few bits"
            if isinstance(weight, Fp8Weight):
                weight = ByteWeight.of(weight.values, weight.scales)
            room = self.scratch.rows[view.width, _row_form(scheme)]
            product: Any = linear_bytes if isinstance(weight, ByteWeight) else linear_int4
            return lambda counts: product(
                quantize_rows(place.of(view, counts), room),
                weight,
                place.of(op.outputs[0], counts),
                bias=bias,
            )
        held = place.weights.plain[name]
        is_plain = bias is None and view.dtype == op.outputs[0].dtype
        if not place.exact and is_plain and held.device.type != "cpu":
            turned = held.T
            return lambda counts: _library_product(
                place.of(view, counts), turned, place.of(op.outputs[0], counts)
            )
        return lambda counts: linear(
            place.of(view, counts),
            held,
            place.of(op.outputs[0], counts),
            bias=bias,
            workspace=self.scratch.workspace,
        )

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


def pack_ints(matrix: IntMatrix, device: torch.device) -> ByteWeight | Int4Weight:
    """An integer weight as its kernel takes it."""
    if matrix.scheme.bits == 8:
        return ByteWeight.of_ints(matrix, device)
    return Int4Weight.of(matrix, device)


def _library_product(x: Tensor, turned: Tensor, y: Tensor) -> None:
    torch.mm(x, turned, out=y)


def _embed(ops: KernelOps, op: Op, counts: Counts) -> None:
    step, weights = ops.place.step, ops.place.weights
    ids = step.token_ids if op.attrs["ids"] == "tokens" else step.rope_positions
    ids, y = ids[: counts.tokens], ops.place.of(op.outputs[0], counts)
    held = weights.few.get(op.attrs["weight"])
    if held is None:
        row_kernels.gather_rows(weights.plain[op.attrs["weight"]], ids, y)
    else:
        row_kernels.gather_rows(held.values[:, : y.shape[1]], ids, y, scales=held.scales)


def _norm(ops: KernelOps, op: Op, counts: Counts) -> None:
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


def _activation(ops: KernelOps, op: Op, counts: Counts) -> None:
    gate = ops.place.of(op.inputs[0], counts)
    up = ops.place.of(op.inputs[1], counts) if len(op.inputs) == 2 else None
    y = ops.place.of(op.outputs[0], counts)
    activation_kernels.activation(gate, up, y, form=op.attrs["form"])


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


def _products(program: Program) -> list[Op]:
    return [op for ops in program.segments.values() for op in ops if op.kind is OpKind.LINEAR]


def _byte_rows(program: Program) -> set[tuple[int, str]]:
    """Columns of products, and the forms that rows take for them."""
    weights = [program.weights[op.attrs["weight"]] for op in _products(program)]
    schemes = [(weight.columns, weight.quantized) for weight in weights]
    return {(columns, _row_form(scheme)) for columns, scheme in schemes if scheme is not None}


def _row_form(scheme: Scheme) -> str:
    return scheme.name if scheme.is_float else "int8"


def _sums(program: Program) -> int:
    """Elements of the pieces of the largest product that is split over programs."""
    rows = FEW_ROWS[-1].rows
    sizes = [0]
    for op in _products(program):
        weight = program.weights[op.attrs["weight"]]
        if weight.quantized is None and -(-weight.rows // FEW_ROWS[0].outputs) < SPLIT_BELOW:
            sizes.append(-(-weight.columns // PIECE) * rows * weight.rows)
    return max(sizes)
