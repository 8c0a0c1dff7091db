"""Products bound to kernels: which of them a weight's product is, and the rows it takes.

Products of bf16 and fp8 are the vendor library's in fast mode, where it has them, and fixed tiles
in exact mode. Those of few bits take rows in bytes (kernels/byte_rows.py), which are made just
before, or by the operation that makes the rows (fused.py). Knows operations and loaded weights.
Always holds: in exact mode a row's bits do not depend on the number of rows, although one or two
rows of integers have a kernel of their own. In fast mode bf16 and fp8 may use other kernels for few
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu import library_fp8
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.int4_layout import Int4Weight
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import MAX_TILES, Workspace, linear, max_sums
from quire.execute.gpu.kernels.linear_gemv import MAX_ROWS, gemv, max_gemv_sums
from quire.execute.gpu.kernels.linear_int4 import linear_int4
from quire.execute.gpu.load import Fp8Weight
from quire.execute.gpu.place import Call, Place
from quire.execute.gpu.step_buffers import Counts
from quire.program.declarations import Weight
from quire.program.ops import Linear
from quire.program.program import Program
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP, Scheme

# Rows of one byte per element: their type, and what their scales belong to.
ROW_FORMS: Mapping[str, tuple[torch.dtype, str]] = {
    "int8": (torch.int8, "block"),
    "fp8": (torch.float8_e4m3fn, "token"),
    "fp8-block": (torch.float8_e4m3fn, "block"),
    "fp8-static": (torch.float8_e4m3fn, "tensor"),
}
ByteProduct = Callable[[ByteRows, Counts], None]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that launches share, one after the other. rows: by columns of a product and the form
    its weight wants them in, one of ROW_FORMS."""

    workspace: Workspace
    rows: Mapping[tuple[int, str], ByteRows]

    @classmethod
    def of(cls, program: Program, limits: StepLimits, device: torch.device) -> Scratch:
        """Return room for the largest launch of a program."""
        rows = max(limits.max_tokens, limits.max_samples)
        return cls(
            workspace=Workspace.of(_sums(program, rows), device),
            rows={
                (columns, form): ByteRows.empty(
                    rows, columns, device, dtype=ROW_FORMS[form][0], scaled=ROW_FORMS[form][1]
                )
                for columns, form in _byte_rows(program)
            },
        )

    @staticmethod
    def num_bytes(program: Program, limits: StepLimits) -> int:
        """Return the bytes of all buffers."""
        rows = max(limits.max_tokens, limits.max_samples)
        of_rows = sum(
            rows * -(-columns // ACTIVATION_GROUP) * (ACTIVATION_GROUP + 4)
            for columns, _ in _byte_rows(program)
        )
        return 4 * (_sums(program, rows) + MAX_TILES) + of_rows


@dataclass(frozen=True, slots=True)
class Products:
    """Binds an executor's products."""

    place: Place
    scratch: Scratch

    def bind(self, op: Linear) -> Call:
        """Return the product, from rows as they are."""
        if op.weight not in self.place.weights.few:
            return self._plain(op)
        place, view, room, product = self.place, op.x, self.room(op), self.by_bytes(op)
        return lambda counts: product(quantize_rows(place.of(view, counts), room), counts)

    def room(self, op: Linear) -> ByteRows:
        """Where rows for a product of few bits become bytes."""
        name, width = op.weight, op.x.width
        scheme, weight = self.place.program.weights[name].quantized, self.place.weights.few[name]
        assert scheme is not None, f"{name} is in few bits"
        room = self.scratch.rows[width, _row_form(scheme)]
        if isinstance(weight, Fp8Weight) and weight.input_scale is not None:
            return replace(room, scales=weight.input_scale)
        return room

    def by_bytes(self, op: Linear) -> ByteProduct:
        """Return the product of few bits, from rows in bytes."""
        place, y = self.place, op.y
        bias, weight = place.vector(op.bias), place.weights.few[op.weight]
        if isinstance(weight, Fp8Weight):
            weight = ByteWeight.of(weight.values, weight.scales)
            library = library_fp8.product_for(
                weight,
                self.room(op),
                place.buffers[y.buffer.index][:, y.offset : y.offset + y.width],
                has_bias=bias is not None,
                exact=place.exact,
            )
            if library is not None:
                return lambda rows, counts: library(rows, place.of(y, counts))
            return lambda rows, counts: linear_bytes(rows, weight, place.of(y, counts), bias=bias)
        workspace = self.scratch.workspace
        return lambda rows, counts: int_product(
            rows, weight, place.of(y, counts), bias=bias, workspace=workspace
        )

    def _plain(self, op: Linear) -> Call:
        place, view = self.place, op.x
        bias, held = place.vector(op.bias), place.weights.plain[op.weight]
        undivided = place.program.weights[op.weight].undivided_rows
        is_plain = bias is None and view.dtype == op.y.dtype
        if not place.exact and is_plain and held.device.type != "cpu":
            product = fast_product(held)
            return lambda counts: product(place.of(view, counts), place.of(op.y, counts))
        return lambda counts: linear(
            place.of(view, counts),
            held,
            place.of(op.y, counts),
            bias=bias,
            workspace=self.scratch.workspace,
            undivided=undivided,
        )


def int_product(
    x: ByteRows,
    weight: ByteWeight | Int4Weight,
    y: Tensor,
    *,
    workspace: Workspace,
    bias: Tensor | None = None,
) -> None:
    """y [R, N] = x @ weight.T (+ bias f32 [N]) of integers; bits do not depend on R."""
    if len(y) <= MAX_ROWS:
        gemv(x, weight, y, bias=bias, workspace=workspace)
    elif isinstance(weight, Int4Weight):
        linear_int4(x, weight, y, bias=bias)
    else:
        linear_bytes(x, weight, y, bias=bias)


def pack_ints(matrix: IntMatrix, device: torch.device) -> ByteWeight | Int4Weight:
    """Return an integer weight as its kernel takes it."""
    if matrix.scheme.bits == 8:
        return ByteWeight.of_ints(matrix, device)
    return Int4Weight.of(matrix, device)


def fast_product(weight: Tensor) -> Callable[[Tensor, Tensor], None]:
    """y = x @ weight.T of bf16 where no order of K is promised: the vendor's.

    On an H200 ours is faster for few rows, by 10 % at most of the smallest of a layer's products,
    which is 0.3 % of a step (bench/gpu/products.py).
    """
    turned = weight.T

    def product(x: Tensor, y: Tensor) -> None:
        torch.mm(x, turned, out=y)

    return product


def _products(program: Program) -> list[Linear]:
    return [op for ops in program.segments.values() for op in ops if isinstance(op, Linear)]


def _byte_rows(program: Program) -> set[tuple[int, str]]:
    """Return columns of products, and the forms that rows take for them."""
    weights = [program.weights[op.weight] for op in _products(program)]
    schemes = [(weight.columns, weight.quantized) for weight in weights]
    return {(columns, _row_form(scheme)) for columns, scheme in schemes if scheme is not None}


def _row_form(scheme: Scheme) -> str:
    return scheme.name if scheme.is_float else "int8"


def _sums(program: Program, rows: int) -> int:
    """Return elements of the pieces of the largest product that is split over programs."""
    return max((_sums_of(program.weights[op.weight], rows) for op in _products(program)), default=0)


def _sums_of(weight: Weight, rows: int) -> int:
    if weight.quantized is None:
        return max_sums(weight.rows, weight.columns, rows, undivided=weight.undivided_rows)
    if weight.ints is None:
        return 0
    return max_gemv_sums(weight.rows, weight.columns, weight.ints.bits)
