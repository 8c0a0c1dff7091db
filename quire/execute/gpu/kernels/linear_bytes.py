"""Products of weights in a byte an element, int8 or fp8 (e4m3), by rows in the same.

Twins: reference_ops.int_linear of scheme int8, bit for bit, and reference_ops.fp8_product, within
the error of f32 sums of 128. Each 128 columns of K are summed by the matrix unit: integers exactly,
fp8 coarsely, and the sums are added in f32 in the order of K; scales of blocks come in with a fused
multiply-add, others at the end, the row's before the weight's. One order for any number of rows:
weights are the first operand, rows the second, so tiles may differ between few rows and many.
Always holds: a row with anything not finite gives NaN where its scale reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import GROUP, ByteRows
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, launch_staged
from quire.execute.gpu.kernels.linear_fixed import Tile, tile_of
from quire.execute.gpu.kernels.rounding import as_type, dot
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP

# Tiles for few rows, and the one for many. Few outputs a program where there are few rows: all of
# the chip must read weights; fp8's instruction takes 64, so that there may be one program for two
# multiprocessors, with 72 KB of weights on their way. Two of fp8's for many rows share a
# multiprocessor: one adds while the other multiplies.
TILES = {
    torch.int8: (
        Tile(outputs=32, rows=16, num_warps=4, num_stages=6),
        Tile(outputs=64, rows=32, num_warps=4, num_stages=5),
        Tile(outputs=64, rows=64, num_warps=4, num_stages=4),
        Tile(outputs=128, rows=128, num_warps=8, num_stages=4),
    ),
    torch.float8_e4m3fn: (
        Tile(outputs=64, rows=16, num_warps=4, num_stages=10),
        Tile(outputs=64, rows=32, num_warps=4, num_stages=8),
        Tile(outputs=64, rows=64, num_warps=4, num_stages=6),
        Tile(outputs=64, rows=128, num_warps=4, num_stages=4),
    ),
}


# Scales of groups are not prefetched: each iteration of the loop waits for them. Tiles of few rows
# unroll the loop, so that several groups share a wait: UNROLLED up to WAITING_ROWS rows, and for
# more rows of int8 UNROLLED_MORE_ROWS.
WAITING_ROWS, UNROLLED, UNROLLED_STAGES = 16, 4, 3
UNROLLED_MORE_ROWS = 2


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """values: int8 or e4m3 [N, groups * 128], zeros past K. scales: f32 [N] a channel's, [1] of the
    tensor, or [ceil(N / 128), groups] of blocks of 128 x 128."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, scales: torch.Tensor) -> ByteWeight:
        """From values [N, K], copied only where K is not whole groups."""
        past = -values.shape[1] % ACTIVATION_GROUP
        if past:  # a zero of either type is a byte of zeros
            padded = torch.nn.functional.pad(values.view(torch.uint8), (0, past))
            values = padded.view(values.dtype)
        return cls(values, scales)

    @classmethod
    def of_ints(cls, matrix: IntMatrix, device: torch.device | str) -> ByteWeight:
        """Return an int8 weight (quire.quant.int_weights) on a device."""
        if matrix.scheme.bits != 8:
            raise ValueError(f"a weight of {matrix.scheme.name}; int8 is needed")
        values = torch.from_numpy(matrix.values.astype(np.int8)).to(device)
        return cls.of(values, torch.from_numpy(np.array(matrix.scales[:, 0])).to(device))


@triton.jit(do_not_specialize=["rows", "num_r"])
def _linear_bytes(
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
    IS_INT: tl.constexpr,
    X_KIND: tl.constexpr,
    W_KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    WIDTH: tl.constexpr = GROUPS * GROUP
    tile_n, tile_r = tile_of(tl.program_id(0), NUM_N, num_r, 8)
    outputs = tile_n * BN + tl.arange(0, BN)
    inside = outputs < N
    r = tile_r * BR + tl.arange(0, BR)
    ks = tl.arange(0, GROUP)
    # What is past the last row or output reads the first one and is not stored.
    row, output = tl.where(r < rows, r, 0), tl.where(inside, outputs, 0)
    w_at = weight + output.to(tl.int64)[:, None] * WIDTH + ks[None, :]
    x_at = x + row.to(tl.int64)[None, :] * WIDTH + ks[:, None]
    total = tl.zeros([BN, BR], tl.float32)
    for group in tl.range(0, GROUPS, loop_unroll_factor=UNROLL):
        w, columns = tl.load(w_at + group * GROUP), tl.load(x_at + group * GROUP)
        if IS_INT:
            part = dot(w, columns, tl.zeros([BN, BR], tl.int32)).to(tl.float32)
        else:
            part = dot(w, columns, tl.zeros([BN, BR], tl.float32))
        if X_KIND == "block" or W_KIND == "block":
            factor = tl.full([BN, BR], 1.0, tl.float32)
            if X_KIND == "block":
                factor *= tl.load(x_scales + group * scale_stride + row)[None, :]
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


def linear_bytes(
    x: ByteRows, weight: ByteWeight, y: torch.Tensor, *, bias: torch.Tensor | None = None
) -> None:
    """y [R, N] = x @ weight.T (+ bias f32 [N]); y is f32 or bf16, any row stride.

    x is what byte_rows.quantize_rows gives, of the weight's type, and may be used for several
    products.
    """
    rows, (outputs, width) = x.values.shape[0], weight.values.shape
    groups, kind = width // ACTIVATION_GROUP, x.values.dtype
    check_rows("x", x.values, rows, width)
    check_rows("y", y, rows, outputs)
    check_vector("bias", bias, outputs, torch.float32)
    blocks = (cdiv(outputs, ACTIVATION_GROUP), groups)
    # A vector of one element is the tensor's, unless there is but one output of it.
    kinds = {blocks: "block", (outputs,): "channel", (1,): "tensor"}
    weight_kind = kinds.get(tuple(weight.scales.shape))
    if weight_kind is None or weight.values.dtype != kind or not weight.values.is_contiguous():
        raise ValueError(
            f"a weight of {weight.values.dtype} with scales {tuple(weight.scales.shape)} for rows "
            f"of {kind}; the same type, row by row, and one of {list(kinds)} is needed"
        )
    if rows == 0:
        return
    tiles = TILES[kind]
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
    is_unrolled = tile.rows <= WAITING_ROWS or (kind == torch.int8 and tile is not tiles[-1])
    if is_unrolled and "block" in (x.scaled, weight_kind):
        unroll = UNROLLED if tile.rows <= WAITING_ROWS else UNROLLED_MORE_ROWS
        tile = tile._replace(num_stages=UNROLLED_STAGES)
    else:
        unroll = 1
    num_n, num_r = cdiv(outputs, tile.outputs), cdiv(rows, tile.rows)
    launch_staged(
        _linear_bytes,
        (num_n * num_r,),
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
        GROUPS=groups,
        BN=tile.outputs,
        BR=tile.rows,
        IS_INT=kind == torch.int8,
        X_KIND=x.scaled,
        W_KIND=weight_kind,
        UNROLL=unroll,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
