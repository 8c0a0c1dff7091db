"""Products in fp8 e4m3: scales a tensor, a channel or a token, or 128-blocks, on either side.

Twins: twins.fp8_rows, bit for bit, and twins.fp8_linear, within the error of f32 sums of 128. Each
128 columns of K are summed by the matrix unit, whose sums of fp8 are coarse, and then added in f32:
with blocks' scales by a fused multiply-add, in the order of K. Other scales come last, the row's
before the weight's. One order for any number of rows: weights are the first operand, rows the
second. Always holds: a row with anything not finite gives NaN where its scale reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, check_rows, check_vector, power_of_two
from quire.execute.gpu.kernels.linear_fixed import Tile, tile_of
from quire.execute.gpu.kernels.rounding import as_e4m3, as_type, dot

GROUP = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-100)
ROW_SCALES = ("tensor", "token", "block")
MOST_GROUPS = 256  # of a row: 32,768 columns
FEW_ROWS = tuple(Tile(outputs=64, rows=rows, num_warps=4, num_stages=6) for rows in (16, 32, 64))
# Two such programs share a multiprocessor: one adds while the other multiplies.
MANY_ROWS = Tile(outputs=64, rows=128, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values: e4m3 [R, groups * 128], zeros past K. scales f32: [1] of the tensor, [R] a token's,
    or [groups, R] for each 128 columns."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """values: e4m3 [N, K]. scales f32: [1] of the tensor, [N] a channel's, or [ceil(N / 128),
    ceil(K / 128)] of blocks, as checkpoints have them."""

    values: torch.Tensor
    scales: torch.Tensor


@triton.jit
def _scale_of(largest, is_whole):
    """Scale and inverse of what has this absmax; 0 and 0 where it is tiny, NaN if not finite."""
    counts = is_whole & (largest >= TINY)
    divisor = tl.where(counts, largest, 1.0)
    scale = tl.where(counts, tl.div_rn(divisor, LARGEST), 0.0)
    inverse = tl.where(counts, tl.div_rn(LARGEST, divisor), 0.0)
    return tl.where(is_whole, scale, float("nan")), inverse


@triton.jit
def _quantize(
    x,
    values,
    scales,
    rows,
    x_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    MANY: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, MANY)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    loaded = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    finite = tl.abs(loaded) < float("inf")
    loaded = tl.where(finite, loaded, 0.0)
    if KIND == "tensor":
        steps = loaded * tl.div_rn(1.0, tl.load(scales))
        steps = tl.where(finite, steps, float("nan"))
    else:
        largest = tl.max(tl.abs(loaded), axis=1)
        is_whole = tl.min(finite.to(tl.int32), axis=1)
        if KIND == "token":
            largest = tl.zeros([MANY], tl.float32) + tl.max(largest, axis=0)
            is_whole = tl.zeros([MANY], tl.int32) + tl.min(is_whole, axis=0)
        scale, inverse = _scale_of(largest, is_whole == 1)
        steps = loaded * inverse[:, None]
        if KIND == "token":
            tl.store(scales + row + groups, scale, mask=groups == 0)
        else:
            tl.store(scales + groups * rows + row, scale, mask=groups < GROUPS)
    at = values + row * (GROUPS * GROUP) + columns
    tl.store(at, as_e4m3(steps), mask=(groups < GROUPS)[:, None])


def quantize_rows_fp8(x: torch.Tensor, kind: str, *, scale: torch.Tensor | None = None) -> Fp8Rows:
    """x [R, K] (f32 or bf16, any row stride) in fp8. kind: "tensor" with its scale f32 [1], which
    is given; "token" or "block": absmax / 448 of a row, or of each 128 columns."""
    rows, columns = x.shape
    check_rows("x", x)
    groups = triton.cdiv(columns, GROUP.value)
    if kind not in ROW_SCALES or (kind == "tensor") != (scale is not None):
        raise ValueError(f"rows by {kind!r}: {', '.join(ROW_SCALES)}; a scale is given for tensor")
    if groups > MOST_GROUPS:
        raise ValueError(f"{columns} columns; up to {MOST_GROUPS * GROUP.value} are allowed")
    shape = (groups, rows) if kind == "block" else (rows,)
    values = torch.empty((rows, groups * GROUP.value), dtype=torch.float8_e4m3fn, device=x.device)
    if scale is None:
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    else:
        check_vector("scale", scale, 1, torch.float32)
    if rows:
        many = power_of_two(groups)
        _quantize[rows,](
            x, values, scale, rows, x.stride(0), K=columns, GROUPS=groups, MANY=many, KIND=kind,
            num_warps=power_of_two(many // 4, most=16), **EXACT,
        )  # fmt: skip
    return Fp8Rows(values, scale)


@triton.jit
def _linear_fp8(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    rows,
    weight_stride,
    y_stride,
    num_r,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    X_KIND: tl.constexpr,
    W_KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile_n, tile_r = tile_of(tl.program_id(0), NUM_N, num_r, 8)
    outputs = tile_n * BN + tl.arange(0, BN)
    inside = outputs < N
    r = tile_r * BR + tl.arange(0, BR)
    ks = tl.arange(0, GROUP)
    row = tl.where(r < rows, r, 0)  # rows past the end read the first and are not stored
    output = tl.where(inside, outputs, 0)
    w_at = weight + output.to(tl.int64)[:, None] * weight_stride + ks[None, :]
    x_at = x + row.to(tl.int64)[None, :] * (GROUPS * GROUP) + ks[:, None]
    total = tl.zeros([BN, BR], tl.float32)
    for group in range(GROUPS):
        k = group * GROUP
        if GROUPS * GROUP == K:
            w = tl.load(w_at + k)
        else:
            w = tl.load(w_at + k, mask=(k + ks < K)[None, :], other=0.0)
        part = dot(w, tl.load(x_at + k), tl.zeros([BN, BR], tl.float32))
        if X_KIND == "block" or W_KIND == "block":
            factor = tl.full([BN, BR], 1.0, tl.float32)
            if X_KIND == "block":
                factor *= tl.load(x_scales + group * rows + row)[None, :]
            if W_KIND == "block":
                factor *= tl.load(scales + (output // GROUP) * GROUPS + group)[:, None]
            total = tl.fma(part, factor, total)
        else:
            total += part
    if X_KIND == "token":
        total *= tl.load(x_scales + row)[None, :]
    elif X_KIND == "tensor":
        total *= tl.load(x_scales)
    if W_KIND == "channel":
        total *= tl.load(scales + output)[:, None]
    elif W_KIND == "tensor":
        total *= tl.load(scales)
    if HAS_BIAS:
        total += tl.load(bias + output)[:, None]
    at = y + r.to(tl.int64)[None, :] * y_stride + outputs[:, None]
    tl.store(at, as_type(total, y.dtype.element_ty), mask=(r < rows)[None, :] & inside[:, None])


def linear_fp8(
    x: Fp8Rows,
    weight: Fp8Weight,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """y [R, N] = x [R, K] @ weight [N, K].T (+ bias f32 [N]); y is f32 or bf16, any row stride."""
    rows, (outputs, columns) = x.values.shape[0], weight.values.shape
    groups = triton.cdiv(columns, GROUP.value)
    check_rows("x", x.values, rows, groups * GROUP.value)
    check_rows("y", y, rows, outputs)
    check_vector("bias", bias, outputs, torch.float32)
    blocks = (triton.cdiv(outputs, GROUP.value), groups)
    # A vector of one element is the tensor's, unless there is but one row or output of it.
    row_kinds = {(groups, rows): "block", (rows,): "token", (1,): "tensor"}
    weight_kinds = {blocks: "block", (outputs,): "channel", (1,): "tensor"}
    x_kind = row_kinds.get(tuple(x.scales.shape))
    weight_kind = weight_kinds.get(tuple(weight.scales.shape))
    if x_kind is None or weight_kind is None:
        raise ValueError(
            f"scales are {tuple(x.scales.shape)} of rows, {tuple(weight.scales.shape)} of weights; "
            f"one of {list(row_kinds)} and of {list(weight_kinds)} is needed"
        )
    if rows == 0:
        return
    tile = next((tile for tile in FEW_ROWS if rows <= tile.rows), MANY_ROWS)
    num_n, num_r = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    _linear_fp8[num_n * num_r,](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        bias if bias is not None else weight.scales,
        y,
        rows,
        weight.values.stride(0),
        y.stride(0),
        num_r,
        N=outputs,
        K=columns,
        GROUPS=groups,
        BN=tile.outputs,
        BR=tile.rows,
        X_KIND=x_kind,
        W_KIND=weight_kind,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
