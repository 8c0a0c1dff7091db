"""Products of int8 weights, one scale a channel, by int8 rows, a scale for each 128 columns.

Twin: reference_ops.int_linear of scheme int8, bit for bit. Integer sums of 128 products are exact
in any order; they are folded into f32 with fused multiply-adds in the order of K, then multiplied
by the channel's scale. So tiles are free to differ between few and many rows, and no bit does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.int_rows import GROUP, IntRows
from quire.execute.gpu.kernels.launch import EXACT, check_rows, check_vector
from quire.execute.gpu.kernels.linear_fixed import Tile, tile_of
from quire.execute.gpu.kernels.rounding import as_type, dot
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP

# Few outputs a program where there are few rows: all of the chip must read weights.
FEW_ROWS = (
    Tile(outputs=32, rows=16, num_warps=4, num_stages=6),
    Tile(outputs=64, rows=32, num_warps=4, num_stages=5),
    Tile(outputs=64, rows=64, num_warps=4, num_stages=4),
)
MANY_ROWS = Tile(outputs=128, rows=128, num_warps=8, num_stages=4)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """values: int8 [N, groups * 128], zeros past K; scales: f32 [N]; columns: K."""

    values: torch.Tensor
    scales: torch.Tensor
    columns: int

    @classmethod
    def of(cls, matrix: IntMatrix, device: torch.device | str) -> Int8Weight:
        """An integer weight (quire.quant.int_weights) on a device."""
        if matrix.scheme.bits != 8:
            raise ValueError(f"a weight of {matrix.scheme.name}; int8 is needed")
        columns = matrix.values.shape[1]
        values = np.pad(matrix.values.astype(np.int8), ((0, 0), (0, -columns % ACTIVATION_GROUP)))
        return cls(
            values=torch.from_numpy(values).to(device),
            scales=torch.from_numpy(np.array(matrix.scales[:, 0])).to(device),
            columns=columns,
        )


@triton.jit
def _linear_int8(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    rows,
    scale_stride,
    y_stride,
    num_r,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile_n, tile_r = tile_of(tl.program_id(0), NUM_N, num_r, 8)
    outputs = tile_n * BN + tl.arange(0, BN)
    r = tile_r * BR + tl.arange(0, BR)
    ks = tl.arange(0, GROUP)
    WIDTH: tl.constexpr = GROUPS * GROUP
    row = tl.where(r < rows, r, 0)  # rows past the end read the first and are not stored
    w_at = weight + tl.where(outputs < N, outputs, 0).to(tl.int64)[:, None] * WIDTH + ks[None, :]
    x_at = x + row.to(tl.int64)[None, :] * WIDTH + ks[:, None]
    total = tl.zeros([BN, BR], tl.float32)
    for group in range(GROUPS):
        whole = tl.zeros([BN, BR], tl.int32)
        whole = dot(tl.load(w_at + group * GROUP), tl.load(x_at + group * GROUP), whole)
        by = tl.load(x_scales + group * scale_stride + row)
        total = tl.fma(whole.to(tl.float32), tl.broadcast_to(by[None, :], [BN, BR]), total)
    inside = outputs < N
    total = total * tl.load(scales + outputs, mask=inside, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=inside, other=0.0)[:, None]
    at = y + r.to(tl.int64)[None, :] * y_stride + outputs[:, None]
    tl.store(at, as_type(total, y.dtype.element_ty), mask=(r < rows)[None, :] & inside[:, None])


def linear_int8(
    x: IntRows, weight: Int8Weight, y: torch.Tensor, *, bias: torch.Tensor | None = None
) -> None:
    """y [R, N] = x @ weight.T (+ bias f32 [N]); y is f32 or bf16, any row stride.

    x is what int_rows.quantize_rows gives, and may be used for several products.
    """
    rows, outputs = x.values.shape[0], weight.values.shape[0]
    check_rows("y", y, rows, outputs)
    check_rows("weight", weight.values, columns=x.values.shape[1])
    check_vector("bias", bias, outputs, torch.float32)
    if rows == 0:
        return
    tile = next((tile for tile in FEW_ROWS if rows <= tile.rows), MANY_ROWS)
    num_n, num_r = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    _linear_int8[num_n * num_r,](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        bias if bias is not None else weight.scales,
        y,
        rows,
        x.scales.stride(0),
        y.stride(0),
        num_r,
        N=outputs,
        GROUPS=x.values.shape[1] // ACTIVATION_GROUP,
        BN=tile.outputs,
        BR=tile.rows,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
