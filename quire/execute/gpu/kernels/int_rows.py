"""Rows of activations as int8, with a scale for each 128 columns: what integer products take.

Twin: quire/quant/int_rows.py, bit for bit: a group's scale is absmax / 127, its integers
rint(x * (127 / absmax)); below TINY zeros, with anything not finite zeros and a scale of NaN.
Always holds: columns past the end are zeros, so that products need no edge in K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.launch import EXACT, check_rows
from quire.quant.scheme import ACTIVATION_GROUP

GROUP = tl.constexpr(ACTIVATION_GROUP)
TINY = tl.constexpr(2.0**-100)
# Added and taken off again, it leaves the nearest whole number, ties to even.
ROUND = tl.constexpr(12_582_912.0)
GROUPS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class IntRows:
    """values: int8 [R, groups * 128]; scales: f32 [groups, R]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device | str) -> IntRows:
        """Room for `rows` rows of `columns` columns."""
        groups = triton.cdiv(columns, ACTIVATION_GROUP)
        return cls(
            values=torch.empty((rows, groups * ACTIVATION_GROUP), dtype=torch.int8, device=device),
            scales=torch.empty((groups, rows), dtype=torch.float32, device=device),
        )


@triton.jit
def _quantize(
    x,
    values,
    scales,
    x_stride,
    scale_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    loaded = tl.load(x + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
    finite = tl.abs(loaded) < float("inf")
    sizes = tl.where(finite, tl.abs(loaded), 0.0)
    largest = tl.max(sizes, axis=1)
    is_whole = tl.min(finite.to(tl.int32), axis=1) == 1
    counts = is_whole & (largest >= TINY)
    divisor = tl.where(counts, largest, 1.0)
    scale = tl.where(counts, tl.div_rn(divisor, 127.0), 0.0)
    scale = tl.where(is_whole, scale, float("nan"))
    inverse = tl.where(counts, tl.div_rn(127.0, divisor), 0.0)
    steps = tl.where(finite, loaded, 0.0) * inverse[:, None]
    steps = (steps + ROUND) - ROUND
    inside = groups < GROUPS
    at = values + row * (GROUPS * GROUP) + columns
    tl.store(at, steps.to(tl.int8), mask=inside[:, None])
    tl.store(scales + groups * scale_stride + row, scale, mask=inside)


def quantize_rows(x: torch.Tensor, out: IntRows) -> IntRows:
    """out = x [R, K] (f32 or bf16, any row stride) as integers; gives out's first R rows."""
    rows, columns = x.shape
    groups = triton.cdiv(columns, ACTIVATION_GROUP)
    check_rows("x", x)
    width = groups * ACTIVATION_GROUP
    if out.values.shape[0] < rows or out.values.shape[1] != width or out.scales.stride(1) != 1:
        raise ValueError(
            f"room for integers {tuple(out.values.shape)} and scales {tuple(out.scales.shape)}; "
            f"at least {rows} rows of {width} are needed"
        )
    taken = IntRows(values=out.values[:rows], scales=out.scales[:, :rows])
    if rows == 0:
        return taken
    _quantize[rows, triton.cdiv(groups, GROUPS_AT_ONCE)](
        x,
        out.values,
        out.scales,
        x.stride(0),
        out.scales.stride(0),
        K=columns,
        GROUPS=groups,
        AT_ONCE=GROUPS_AT_ONCE,
        num_warps=4,
        **EXACT,
    )
    return taken
