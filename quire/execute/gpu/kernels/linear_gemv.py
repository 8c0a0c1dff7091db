"""Products of int8 and int4 weights by one or two int8 rows, without the matrix unit.

At one or two rows a product is limited by reading its weight. Each thread multiplies the bytes that
it loaded, four per instruction (dp4a). A weight with few outputs is split along K over several
programs (split-K): they store one partial sum per 128 columns, and the last program of a tile adds
them in the order of K. Sums of a group are whole numbers, so bits equal those of linear_bytes.py
and linear_int4.py. Twin: reference_ops.int_linear, bit for bit. Knows nothing of rows of floats or
fp8. Scratch (`Workspace`) is the caller's, used by one launch at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.execute.gpu.kernels.byte_rows import ByteRows
from quire.execute.gpu.kernels.int4_layout import Int4Weight
from quire.execute.gpu.kernels.launch import EXACT, cdiv, check_rows, check_vector
from quire.execute.gpu.kernels.linear_bytes import ByteWeight
from quire.execute.gpu.kernels.linear_fixed import Workspace
from quire.execute.gpu.kernels.rounding import INTERPRETED, as_type
from quire.quant.scheme import ACTIVATION_GROUP

HAS_PTX = torch.version.hip is None and not INTERPRETED

MAX_ROWS = 2  # each row reads the weights again, from the second-level cache
# Programs that fill an H200: eight for each multiprocessor, so that 32 warps wait for weights.
MIN_PROGRAMS = 1056
MIN_SPLIT_BLOCKS = 4  # of 128 columns, of a program where several share a tile's


class Shape(NamedTuple):
    """Outputs of a program, its warps, and blocks of 128 columns a turn of its loop."""

    outputs: int
    num_warps: int
    unroll: int


# By bits of a weight: where small tiles are programs enough, and where K is split.
UNSPLIT = {8: Shape(outputs=16, num_warps=4, unroll=4), 4: Shape(outputs=8, num_warps=1, unroll=4)}
SPLIT = {8: Shape(outputs=64, num_warps=4, unroll=2), 4: Shape(outputs=64, num_warps=4, unroll=2)}


# Bytes of an int32: the high nibbles, the highest bits, and ones.
HIGH, SIGNS = tl.constexpr(0xF0F0F0F0 - 2**32), tl.constexpr(0x80808080 - 2**32)
ONES = tl.constexpr(0x01010101)


@triton.jit
def dot4(a, b, sums, HAS_DP4A: tl.constexpr):
    """Return sums + the products of the four signed bytes in each int32 of a and b."""
    if HAS_DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for shift in tl.static_range(0, 32, 8):
        sums += ((a << (24 - shift)) >> 24) * ((b << (24 - shift)) >> 24)
    return sums


@triton.jit
def _bytes_block(w, x, sums, HAS_DP4A: tl.constexpr):
    """Return the sums of a block of int8 as f32: w [BN, 32] and x [32] in words of four."""
    return tl.sum(dot4(w, x, sums, HAS_DP4A), axis=1).to(tl.float32)


@triton.jit
def _nibbles_block(
    w,
    x,
    scales,
    zeros,
    block,
    outputs,
    inside,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_DP4A: tl.constexpr,
):
    """Return the sums of a block of int4, folded with the scales of its groups; w [BN, 16]; x: the
    row's words of this block."""
    HALF: tl.constexpr = 16 if GROUP >= 64 else 8  # words from one nibble to the other
    word = tl.arange(0, 16)
    at = x + (word // HALF) * (2 * HALF) + word % HALF
    x_low, x_high = tl.load(at)[None, :], tl.load(at + HALF)[None, :]
    none = tl.zeros(w.shape, tl.int32)
    # A nibble less 8 as the high half of its byte: 16 times what is wanted.
    low = dot4(((w << 4) & HIGH) ^ SIGNS, x_low, none, HAS_DP4A)
    if GROUP == 128:
        low = dot4((w & HIGH) ^ SIGNS, x_high, low, HAS_DP4A)
        high = none
    else:
        high = dot4((w & HIGH) ^ SIGNS, x_high, none, HAS_DP4A)
    ones = tl.full([1, 16], ONES, tl.int32)
    low_x = dot4(ones, x_low, tl.zeros([1, 16], tl.int32), HAS_DP4A)
    high_x = dot4(ones, x_high, tl.zeros([1, 16], tl.int32), HAS_DP4A)
    if GROUP == 128:
        low_x += high_x
    by_weight = tl.zeros([w.shape[0]], tl.float32)
    PARTS: tl.constexpr = 128 // GROUP
    for part in tl.static_range(PARTS):
        sums, of_x = (low, low_x) if part % 2 == 0 else (high, high_x)
        if GROUP == 32:
            is_here = (word // HALF == part // 2)[None, :]
            sums, of_x = tl.where(is_here, sums, 0), tl.where(is_here, of_x, 0)
        # Groups past the end are of zeros; they read the last one's scale.
        group = tl.minimum(block * PARTS + part, GROUPS - 1)
        whole = tl.sum(sums, axis=1) >> 4
        if HAS_ZEROS:
            zero = tl.load(zeros + group * N + outputs, mask=inside, other=0).to(tl.int32)
            whole += tl.sum(of_x, axis=1) * (8 - zero)
        scale = tl.load(scales + group * N + outputs, mask=inside, other=0.0).to(tl.float32)
        by_weight = tl.fma(whole.to(tl.float32), scale, by_weight)
    return by_weight


@triton.jit(do_not_specialize=["rows"])
def _gemv(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    bias,
    y,
    sums,
    arrived,
    rows,
    x_stride,
    x_scale_stride,
    y_stride,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BN: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DP4A: tl.constexpr,
):
    """One row by a tile of outputs, all of its blocks or a share; the last share adds them up."""
    row = tl.program_id(0) % rows
    split = tl.program_id(0) // rows % SPLITS
    tile = tl.program_id(0) // rows // SPLITS
    outputs = tile * BN + tl.arange(0, BN)
    inside = outputs < N
    WORDS: tl.constexpr = 4 * BITS  # int32 of a block of an output
    STEP: tl.constexpr = WORDS if BITS == 8 else 1024  # to the next block
    word = tl.arange(0, WORDS)
    x += row.to(tl.int64) * x_stride
    if BITS == 8:
        w_at = weight + tl.where(inside, outputs, 0).to(tl.int64)[:, None] * (BLOCKS * WORDS)
    else:
        w_at = weight + (outputs // 64).to(tl.int64)[:, None] * (BLOCKS * 1024)
        w_at += (outputs % 64)[:, None] * WORDS
    w_at += word[None, :]
    total = tl.zeros([BN], tl.float32)
    none = tl.zeros([BN, WORDS], tl.int32)
    sums_at = sums + row.to(tl.int64) * (BLOCKS * N) + outputs
    first = split * PER_SPLIT
    end = tl.minimum(first + PER_SPLIT, BLOCKS)
    for block in tl.range(first, end, loop_unroll_factor=UNROLL, num_stages=1):
        w = tl.load(w_at + block * STEP)
        if BITS == 8:
            part = _bytes_block(w, tl.load(x + block * 32 + word)[None, :], none, HAS_DP4A)
        else:
            part = _nibbles_block(
                w, x + block * 32, scales, zeros, block, outputs, inside,
                N, GROUPS, GROUP, HAS_ZEROS, HAS_DP4A,
            )  # fmt: skip
        if SPLITS > 1:
            tl.store(sums_at + block * N, part, mask=inside)
        else:
            total = tl.fma(part, tl.load(x_scales + block * x_scale_stride + row), total)
    is_last = True
    if SPLITS > 1:
        tl.debug_barrier()
        here = arrived + tile * rows + row
        is_last = tl.atomic_add(here, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(here, 0)
            for block in tl.range(0, BLOCKS, loop_unroll_factor=16, num_stages=1):
                part = tl.load(sums_at + block * N, mask=inside, other=0.0, cache_modifier=".cg")
                total = tl.fma(part, tl.load(x_scales + block * x_scale_stride + row), total)
    if is_last:
        if BITS == 8:
            total *= tl.load(scales + outputs, mask=inside, other=0.0)
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=inside, other=0.0)
        at = y + row.to(tl.int64) * y_stride + outputs
        tl.store(at, as_type(total, y.dtype.element_ty), mask=inside)


class KSplit(NamedTuple):
    """The programs' shape, blocks of a program, and programs of a tile."""

    shape: Shape
    per_split: int
    splits: int


def k_split_of(outputs: int, blocks: int, bits: int) -> KSplit:
    """Return how programs share a weight; rows do not matter."""
    if cdiv(outputs, UNSPLIT[bits].outputs) >= MIN_PROGRAMS:
        return KSplit(UNSPLIT[bits], blocks, 1)
    shape = SPLIT[bits]
    wanted = max(1, MIN_PROGRAMS // cdiv(outputs, shape.outputs))
    per_split = max(cdiv(blocks, wanted), min(MIN_SPLIT_BLOCKS, blocks))
    return KSplit(shape, per_split, cdiv(blocks, per_split))


def max_gemv_sums(outputs: int, columns: int, bits: int) -> int:
    """Return elements that a Workspace needs for a weight."""
    blocks = cdiv(columns, ACTIVATION_GROUP)
    return MAX_ROWS * blocks * outputs if k_split_of(outputs, blocks, bits).splits > 1 else 0


def gemv(
    x: ByteRows,
    weight: ByteWeight | Int4Weight,
    y: torch.Tensor,
    *,
    workspace: Workspace,
    bias: torch.Tensor | None = None,
) -> None:
    """y [R, N] = x @ weight.T (+ bias f32 [N]) for up to MAX_ROWS int8 rows with scales of blocks.

    weight: int8 with a scale for each output, or int4; y is f32 or bf16, any row stride.
    """
    blocks = x.groups
    if isinstance(weight, Int4Weight):
        values, zeros, bits, outputs = weight.packed, weight.zeros, 4, weight.outputs
        group, groups = weight.group, len(weight.scales)
    else:
        values, zeros, bits, outputs = weight.values, None, 8, len(weight.values)
        group, groups = ACTIVATION_GROUP, blocks
    check_rows("x", x.values, len(y), blocks * ACTIVATION_GROUP)
    check_rows("y", y, len(y), outputs)
    check_vector("bias", bias, outputs, torch.float32)
    if len(y) > MAX_ROWS:
        raise ValueError(f"{len(y)} rows; at most {MAX_ROWS} are taken here")
    if x.scaled != "block" or not values.is_contiguous():
        raise ValueError("rows with scales of blocks, and a contiguous weight, are needed")
    if not len(y):
        return
    shape, per_split, splits = k_split_of(outputs, blocks, bits)
    num_tiles = cdiv(outputs, shape.outputs)
    if splits > 1:
        sums, counters = len(workspace.sums), len(workspace.arrived)
        if sums < len(y) * blocks * outputs or counters < num_tiles * len(y):
            raise ValueError(
                f"room for {sums} sums and {counters} counters; {len(y)} rows need "
                f"{len(y) * blocks * outputs} and {num_tiles * len(y)}"
            )
    _gemv[(num_tiles * splits * len(y),)](
        x.values.view(torch.int32),
        x.scales,
        values.view(torch.int32),
        weight.scales,
        values if zeros is None else zeros,
        weight.scales if bias is None else bias,
        y,
        workspace.sums,
        workspace.arrived,
        len(y),
        x.values.stride(0) // 4,
        x.scales.stride(0),
        y.stride(0),
        N=outputs,
        BLOCKS=blocks,
        GROUPS=groups,
        GROUP=group,
        BITS=bits,
        BN=shape.outputs,
        PER_SPLIT=per_split,
        SPLITS=splits,
        UNROLL=shape.unroll,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        HAS_DP4A=HAS_PTX,
        num_warps=shape.num_warps,
        num_stages=1,
        **EXACT,
    )
