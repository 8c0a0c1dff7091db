"""y = form(gate) * up, element by element.

Twin: reference_ops.activation. Arithmetic is f32, rounded once where y is stored. Gate and up are
usually two halves of one buffer, so each has its row stride. Knows no weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.curves import activated
from quire.execute.gpu.kernels.launch import EXACT, check_rows, power_of_two
from quire.execute.gpu.kernels.rounding import as_type

FORMS = ("silu", "gelu", "gelu_tanh", "relu")
MOST_COLUMNS = 2048  # of one program


@triton.jit
def _activation(
    gate,
    up,
    y,
    gate_stride,
    up_stride,
    y_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    HAS_UP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = activated(x, FORM)
    if HAS_UP:
        result *= tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + columns, as_type(result, y.dtype.element_ty), mask=inside)


def activation(gate: torch.Tensor, up: torch.Tensor | None, y: torch.Tensor, *, form: str) -> None:
    """y [R, N] = form(gate [R, N]) * up [R, N], without up where there is none.

    f32 or bf16, any row strides; y may be gate or up.
    """
    rows, width = gate.shape
    check_rows("gate", gate)
    check_rows("y", y, rows, width)
    if up is not None:
        check_rows("up", up, rows, width)
    if form not in FORMS:
        raise ValueError(f"activation {form!r}; {', '.join(FORMS)} exist")
    if rows == 0:
        return
    block = power_of_two(width, most=MOST_COLUMNS)
    _activation[rows, triton.cdiv(width, block)](
        gate,
        up if up is not None else gate,
        y,
        gate.stride(0),
        up.stride(0) if up is not None else 0,
        y.stride(0),
        WIDTH=width,
        BLOCK=block,
        FORM=form,
        HAS_UP=up is not None,
        num_warps=power_of_two(block // 256, most=8),
        **EXACT,
    )
