"""Products of int4 weights in groups of 32, 64 or 128, by int8 rows or by bf16 and f32 rows.

By int8 rows (what the schemes mean): twin reference_ops.int_linear, bit for bit. Sums of a group
are whole numbers and exact; they are folded with fused multiply-adds in the order of K, by the
weights' groups within 128 columns, then by the rows' scale for these. By bf16 or f32 rows (weights
only): twin twins.weight_only; a group's products are added in f32, then scaled. Integers are taken
from their bytes in registers. One order for any number of rows: of integers always, of floats
because each tile has the weights as its first operand and at least 64 outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import ByteRows
from quire.execute.gpu.kernels.int4_layout import BLOCK, Int4Weight
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector, launch_staged
from quire.execute.gpu.kernels.linear_bytes import UNROLLED, WAITING_ROWS
from quire.execute.gpu.kernels.linear_fixed import Tile, tile_of
from quire.execute.gpu.kernels.rounding import as_type, dot, whole_as

FEW_ROWS = tuple(Tile(outputs=64, rows=rows, num_warps=4, num_stages=5) for rows in (16, 32, 64))
FEW_INT_ROWS = (Tile(outputs=32, rows=16, num_warps=4, num_stages=4), *FEW_ROWS[1:])
MANY_INT_ROWS = Tile(outputs=128, rows=64, num_warps=8, num_stages=4)
MANY_ROWS = Tile(outputs=128, rows=128, num_warps=8, num_stages=3)


@triton.jit
def group_sums(
    bytes_,
    x_at,
    zero,
    k,
    K: tl.constexpr,
    IS_HIGH: tl.constexpr,
    IS_INT: tl.constexpr,
    BY_MASKS: tl.constexpr,
    sums,
):
    """Return sums + (nibbles - zero) @ the columns of x from k on; nibbles: high or low ones.

    BY_MASKS: bytes are masked, four of them an instruction, and multiplied as they are: 16 times
    what is wanted less 8, or what is wanted. What the zeros take off comes from sums of x, which
    are products with ones: they cost few rows less than taking bytes apart. The same integers.
    """
    if BY_MASKS:
        x = tl.load(x_at)
        none = tl.zeros(sums.shape, tl.int32)
        ones = tl.full(bytes_.shape, 1, tl.int8)
        if IS_HIGH:
            weights = ((bytes_ & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
            part = dot(weights, x, none) >> 4
            return sums + part + dot(ones, x, none) * (8 - zero.to(tl.int32))
        part = dot((bytes_ & 15).to(tl.int8, bitcast=True), x, none)
        return sums + part - dot(ones, x, none) * zero.to(tl.int32)
    nibbles = (bytes_ >> 4) if IS_HIGH else (bytes_ & 15)
    weights = nibbles.to(tl.int8) - zero
    if IS_INT:
        return dot(weights, tl.load(x_at), sums)
    x = tl.load(x_at, mask=(k < K)[:, None], other=0.0)
    return dot(whole_as(weights, x.dtype), x, sums)


@triton.jit
def zero_of(zeros, group, outputs, inside, N: tl.constexpr, HAS_ZEROS: tl.constexpr):
    if HAS_ZEROS:
        loaded = tl.load(zeros + group * N + outputs, mask=inside, other=0)
        zero = loaded.to(tl.int8)[:, None]
    else:
        zero = tl.full([1, 1], 8, tl.int8)
    return zero


@triton.jit(do_not_specialize=["rows", "num_r"])
def _linear_int4(
    x,
    x_scales,
    packed,
    scales,
    zeros,
    bias,
    y,
    rows,
    x_stride,
    x_scale_stride,
    y_stride,
    num_r,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    IS_INT: tl.constexpr,
    BY_MASKS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    tile_n, tile_r = tile_of(tl.program_id(0), NUM_N, num_r, 8)
    outputs = tile_n * BN + tl.arange(0, BN)
    inside = outputs < N
    r = tile_r * BR + tl.arange(0, BR)
    row = tl.where(r < rows, r, 0)  # rows past the end read the first and are not stored
    ks = tl.arange(0, HALF)
    panel_at = packed + (outputs // 64).to(tl.int64)[:, None] * (BLOCKS * 4096)
    byte_at = panel_at + (outputs % 64)[:, None] * 64 + ks[None, :]
    x_at = x + row.to(tl.int64)[None, :] * x_stride + ks[:, None]
    sum_type: tl.constexpr = tl.int32 if IS_INT else tl.float32
    by_weight = tl.zeros([BN, BR], tl.float32)
    total = tl.zeros([BN, BR], tl.float32)
    NUM_RUNS: tl.constexpr = 64 // HALF  # of bytes in a block
    for block in tl.range(0, BLOCKS, loop_unroll_factor=UNROLL):
        if IS_INT:
            by_weight = tl.zeros([BN, BR], tl.float32)
        for run in tl.static_range(NUM_RUNS):
            k = block * 128 + run * (2 * HALF)
            bytes_ = tl.load(byte_at + block * 4096 + run * HALF)
            # Groups past the end are of zeros; they read the last one's scale.
            group = tl.minimum(k // GROUP, GROUPS - 1)
            zero = zero_of(zeros, group, outputs, inside, N, HAS_ZEROS)
            sums = tl.zeros([BN, BR], sum_type)
            sums = group_sums(bytes_, x_at + k, zero, k + ks, K, False, IS_INT, BY_MASKS, sums)
            if GROUP == HALF:  # the other nibble is of the next group
                by_weight = folded(sums, scales, group, outputs, inside, by_weight, N)
                group = tl.minimum(group + 1, GROUPS - 1)
                zero = zero_of(zeros, group, outputs, inside, N, HAS_ZEROS)
                sums = tl.zeros([BN, BR], sum_type)
            k += HALF
            sums = group_sums(bytes_, x_at + k, zero, k + ks, K, True, IS_INT, BY_MASKS, sums)
            by_weight = folded(sums, scales, group, outputs, inside, by_weight, N)
        if IS_INT:
            by = tl.load(x_scales + block * x_scale_stride + row)
            total = tl.fma(by_weight, tl.broadcast_to(by[None, :], [BN, BR]), total)
    if not IS_INT:
        total = by_weight
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=inside, other=0.0)[:, None]
    at = y + r.to(tl.int64)[None, :] * y_stride + outputs[:, None]
    tl.store(at, as_type(total, y.dtype.element_ty), mask=(r < rows)[None, :] & inside[:, None])


@triton.jit
def folded(sums, scales, group, outputs, inside, total, N: tl.constexpr):
    """total + sums * the group's scales."""
    scale = tl.load(scales + group * N + outputs, mask=inside, other=0.0)
    scale = tl.broadcast_to(scale.to(tl.float32)[:, None], sums.shape)
    return tl.fma(sums.to(tl.float32), scale, total)


def linear_int4(
    x: ByteRows | torch.Tensor,
    weight: Int4Weight,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """y [R, N] = x @ weight.T (+ bias f32 [N]); y is f32 or bf16, any row stride.

    x: integers of all blocks (byte_rows.quantize_rows), or [R, K] of bf16 or f32, any row stride.
    """
    is_int = isinstance(x, ByteRows)
    values = x.values if isinstance(x, ByteRows) else x
    blocks = weight.packed.shape[1]
    rows, outputs = values.shape[0], weight.outputs
    check_rows("x", values, rows, blocks * BLOCK if is_int else weight.columns)
    check_rows("y", y, rows, outputs)
    check_vector("bias", bias, outputs, torch.float32)
    if rows == 0:
        return
    few, many = (FEW_INT_ROWS, MANY_INT_ROWS) if is_int else (FEW_ROWS, MANY_ROWS)
    tile = next((tile for tile in few if rows <= tile.rows), many)
    num_n, num_r = cdiv(outputs, tile.outputs), cdiv(rows, tile.rows)
    launch_staged(
        _linear_int4,
        (num_n * num_r,),
        values,
        x.scales if isinstance(x, ByteRows) else values,
        weight.packed,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.packed,
        bias if bias is not None else weight.scales,
        y,
        rows,
        values.stride(0),
        x.scales.stride(0) if isinstance(x, ByteRows) else 0,
        y.stride(0),
        num_r,
        N=outputs,
        K=weight.columns,
        BLOCKS=blocks,
        GROUPS=weight.scales.shape[0],
        GROUP=weight.group,
        HALF=min(weight.group, 64),
        BN=tile.outputs,
        BR=tile.rows,
        IS_INT=is_int,
        BY_MASKS=is_int and tile.rows <= WAITING_ROWS,
        UNROLL=UNROLLED if is_int and tile.rows <= WAITING_ROWS else 1,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **EXACT,
    )
