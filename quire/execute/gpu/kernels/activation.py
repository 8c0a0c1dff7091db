"""y = form(gate) * up, element by element.

Twin: reference_ops.activation. Arithmetic is f32, rounded once where y is stored. Gate and up are
usually two halves of one buffer, so each has its row stride. Rows may become bytes for the product
that comes next (byte_rows.py), of what y would be rounded to, whether y is stored or not. Knows no
weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import (
    GROUP,
    ByteRows,
    quantize_rows,
    room_for,
    store_bytes,
)
from quire.execute.gpu.kernels.curves import activated
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, power_of_two
from quire.execute.gpu.kernels.rounding import as_type
from quire.quant.scheme import ACTIVATION_GROUP

FORMS = ("silu", "gelu", "gelu_tanh", "relu")
MAX_COLUMNS = 2048  # of one program
# A row that has one scale is one program's; of this form more does not fit into its registers.
MAX_OF_A_ROW = {"gelu_tanh": 8192}


@triton.jit
def _activation(
    gate,
    up,
    y,
    values_out,
    scales,
    gate_stride,
    up_stride,
    y_stride,
    scale_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    HAS_UP: tl.constexpr,
    STORES_Y: tl.constexpr,
    BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = activated(x, FORM)
    if HAS_UP:
        result *= tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = as_type(result, y.dtype.element_ty)
    if STORES_Y:
        tl.store(y + row * y_stride + columns, result, mask=inside)
    if BYTES != "":
        GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        AT_ONCE: tl.constexpr = BLOCK // GROUP
        kept = tl.reshape(tl.where(inside, result.to(tl.float32), 0.0), [AT_ONCE, GROUP])
        groups = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        store_bytes(
            kept, row, groups, values_out, scales, scale_stride, GROUPS, AT_ONCE, LARGEST, BYTES
        )


def activation(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    y: torch.Tensor,
    *,
    form: str,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    """y [R, N] = form(gate [R, N]) * up [R, N], without up where there is none.

    f32 or bf16, any row strides; y may be gate or up. out: room for y in bytes; without stores_y
    y is not written; only its dtype counts.
    """
    rows, width = gate.shape
    check_rows("gate", gate)
    check_rows("y", y, rows, width)
    if up is not None:
        check_rows("up", up, rows, width)
    if form not in FORMS:
        raise ValueError(f"activation {form!r}; {', '.join(FORMS)} exist")
    least, most = 1, MAX_COLUMNS
    if out is not None:
        room_for(out, rows, width)
        least, most = ACTIVATION_GROUP, MAX_COLUMNS if out.scaled != "token" else 2**30
    if rows == 0:
        return
    block = power_of_two(width, least=least, most=most)
    if out is not None and block > MAX_OF_A_ROW.get(form, block):
        activation(gate, up, y, form=form)
        quantize_rows(y, out)
        return
    _activation[rows, cdiv(width, block)](
        gate,
        up if up is not None else gate,
        y,
        out.values if out is not None else gate,
        out.scales if out is not None else gate,
        gate.stride(0),
        up.stride(0) if up is not None else 0,
        y.stride(0),
        out.scales.stride(0) if out is not None else 0,
        WIDTH=width,
        BLOCK=block,
        FORM=form,
        HAS_UP=up is not None,
        STORES_Y=stores_y,
        BYTES=out.scaled if out is not None else "",
        LARGEST=out.largest if out is not None else 0.0,
        num_warps=power_of_two(block // 256, most=8 if block <= MAX_COLUMNS else 16),
        **EXACT,
    )
