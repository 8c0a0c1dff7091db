"""Rows moved and changed element by element: gather, embed, add, scale, soft cap, copy.

Twins: reference_ops.embed, gather_rows, add, scale, soft_cap, copy. Arithmetic is f32, rounded once
by the dtype of what is stored. Always holds: a row is read and written by programs of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.curves import tanh
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.rounding import as_type

MAX_COLUMNS = 2048  # of one program


@triton.jit
def _gather(
    table,
    scales,
    ids,
    y,
    table_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(table + source * table_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALES:
        values *= tl.load(scales + source)
    tl.store(y + row * y_stride + columns, as_type(values, y.dtype.element_ty), mask=inside)


@triton.jit
def _change(
    x,
    other,
    y,
    x_stride,
    other_stride,
    y_stride,
    number,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "add":
        added = tl.load(other + row * other_stride + columns, mask=inside, other=0.0)
        values += added.to(tl.float32)
    elif KIND == "scale":
        values *= number
    elif KIND == "soft_cap":
        values = tanh(tl.div_rn(values, number)) * number
    tl.store(y + row * y_stride + columns, as_type(values, y.dtype.element_ty), mask=inside)


def gather_rows(
    table: torch.Tensor,
    ids: torch.Tensor,
    y: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """y [R, N] = rows of table [V, N] by ids int32 [R]; ids lie within the table (not checked).

    table: f32, bf16, or int8 or fp8 (e4m3) with scales f32 [V], one a row. y: f32 or bf16.
    """
    rows, width = y.shape
    check_rows("table", table, columns=width)
    check_rows("y", y)
    check_vector("ids", ids, rows, torch.int32)
    check_vector("scales", scales, table.shape[0], torch.float32)
    if (table.dtype in (torch.int8, torch.float8_e4m3fn)) != (scales is not None):
        raise ValueError(f"a table of {table.dtype}: scales belong to int8 and fp8 only")
    if rows == 0:
        return
    block = power_of_two(width, most=MAX_COLUMNS)
    _gather[rows, cdiv(width, block)](
        table,
        scales if scales is not None else ids,
        ids,
        y,
        table.stride(0),
        y.stride(0),
        WIDTH=width,
        BLOCK=block,
        HAS_SCALES=scales is not None,
        num_warps=power_of_two(block // 256, most=8),
        **EXACT,
    )


def add(x: torch.Tensor, other: torch.Tensor) -> None:
    """x [R, N] += other [R, N], rounded to x's dtype."""
    _launch_change(x, other, x, 0.0, "add")


def scale(x: torch.Tensor, factor: float) -> None:
    """x [R, N] *= factor (as f32)."""
    _launch_change(x, None, x, factor, "scale")


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x [R, N] = cap * tanh(x / cap)."""
    _launch_change(x, None, x, cap, "soft_cap")


def copy(x: torch.Tensor, y: torch.Tensor) -> None:
    """y [R, N] = x [R, N], rounded to y's dtype."""
    _launch_change(x, None, y, 0.0, "copy")


def _launch_change(
    x: torch.Tensor, other: torch.Tensor | None, y: torch.Tensor, number: float, kind: str
) -> None:
    rows, width = x.shape
    check_rows("x", x)
    check_rows("y", y, rows, width)
    if other is not None:
        check_rows("other", other, rows, width)
    if rows == 0:
        return
    block = power_of_two(width, most=MAX_COLUMNS)
    _change[rows, cdiv(width, block)](
        x,
        other if other is not None else x,
        y,
        x.stride(0),
        other.stride(0) if other is not None else 0,
        y.stride(0),
        float(number),
        WIDTH=width,
        BLOCK=block,
        KIND=kind,
        num_warps=power_of_two(block // 256, most=8),
        **EXACT,
    )
