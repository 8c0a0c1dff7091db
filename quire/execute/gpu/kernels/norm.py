"""RMS and layer norm of rows, the residual added first where there is one, whole or by groups.

Twin: reference_ops.norm (and add). One program a row and group: a row's sum has one order, fixed by
the width alone. Sums are f32; x + delta is rounded to x's dtype, stored, and what was stored is
normed. Whole rows may become bytes for the product that comes next (byte_rows.py), of what y would
be rounded to, whether y is stored or not. Knows nothing of heads: groups of head_dim columns are
the q/k norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import GROUP, ByteRows, room_for, store_bytes
from quire.execute.gpu.kernels.launch import EXACT, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.rounding import as_type
from quire.quant.scheme import ACTIVATION_GROUP

FORMS = ("rms", "layer")
WARP_ELEMENTS = 512  # columns that one warp takes


@triton.jit
def _norm(
    x,
    delta,
    weight,
    bias,
    y,
    values_out,
    scales,
    x_stride,
    delta_stride,
    y_stride,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORES_Y: tl.constexpr,
    BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x_at = x + row * x_stride + first + columns
    values = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + first + columns, mask=inside, other=0.0)
        rounded = as_type(values + added.to(tl.float32), x.dtype.element_ty)
        tl.store(x_at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if IS_LAYER:
        mean = tl.div_rn(tl.sum(values, axis=0), WIDTH * 1.0)
        values = tl.where(inside, values - mean, 0.0)
    mean_square = tl.div_rn(tl.sum(values * values, axis=0), WIDTH * 1.0)
    values = values * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    if HAS_WEIGHT:
        values = values * tl.load(weight + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        values = values + tl.load(bias + columns, mask=inside, other=0.0)
    result = as_type(values, y.dtype.element_ty)
    if STORES_Y:
        tl.store(y + row * y_stride + first + columns, result, mask=inside)
    if BYTES != "":
        GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        AT_ONCE: tl.constexpr = BLOCK // GROUP
        kept = tl.reshape(tl.where(inside, result.to(tl.float32), 0.0), [AT_ONCE, GROUP])
        groups = tl.arange(0, AT_ONCE)
        store_bytes(
            kept, row, groups, values_out, scales, scale_stride, GROUPS, AT_ONCE, LARGEST, BYTES
        )


def norm(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    eps: float,
    form: str = "rms",
    group: int = 0,
    out: ByteRows | None = None,
    stores_y: bool = True,
) -> None:
    """y [R, N] = norm of x [R, N] (after x += delta [R, N], in place, where delta is given).

    x, y, delta: f32 or bf16, any row stride. weight, bias: f32 [group or N]. group > 0: each run of
    so many columns by itself, with the same weight. y may be x. out: room for y in bytes, where
    group is 0; without stores_y y is not written, and its dtype is what
    counts.
    """
    rows, width = x.shape
    size = group or width
    check_rows("x", x)
    check_rows("y", y, rows, width)
    if delta is not None:
        check_rows("delta", delta, rows, width)
    check_vector("weight", weight, size, torch.float32)
    check_vector("bias", bias, size, torch.float32)
    if form not in FORMS:
        raise ValueError(f"norm of form {form!r}; {' and '.join(FORMS)} exist")
    if width % size:
        raise ValueError(f"{width} columns are no whole number of groups of {size}")
    if out is not None:
        if group:
            raise ValueError(f"rows normed by groups of {group} do not become bytes; whole ones do")
        room_for(out, rows, width)
    if rows == 0:
        return
    block = power_of_two(size, least=1 if out is None else ACTIVATION_GROUP)
    _norm[rows, width // size](
        x,
        delta if delta is not None else x,
        weight if weight is not None else x,
        bias if bias is not None else x,
        y,
        out.values if out is not None else x,
        out.scales if out is not None else x,
        x.stride(0),
        delta.stride(0) if delta is not None else 0,
        y.stride(0),
        out.scales.stride(0) if out is not None else 0,
        eps,
        WIDTH=size,
        BLOCK=block,
        IS_LAYER=form == "layer",
        HAS_DELTA=delta is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        STORES_Y=stores_y,
        BYTES=out.scaled if out is not None else "",
        LARGEST=out.largest if out is not None else 0.0,
        num_warps=power_of_two(block // WARP_ELEMENTS, most=16),
        **EXACT,
    )
