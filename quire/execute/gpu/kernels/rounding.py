"""What devices do and Triton's interpreter does not: rounding to narrow types, products of tiles.

The interpreter cuts bits off where devices round to the nearest, so there the rounding is done on
integers first. Its products of bf16 are of the bits, and those of f32 have an order that depends
on the shape, so there they are sums of 32 in the order of K, however many come at a time, and small
enough for what it takes as one tensor. Always holds: NaN stays NaN. Knows no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-100)  # as quire/quant/int_rows.py
# Added and taken off again, it leaves the nearest whole number, ties to even.
ROUND = tl.constexpr(12_582_912.0)
# Fixed when kernels are decorated, as Triton fixes it.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def as_type(x, dtype: tl.constexpr):
    """f32 values as f32 or bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, rounded, bits | 0x400000) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def as_e4m3(x):
    """f32 values as fp8 e4m3, to the nearest, those beyond 448 as 448."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        usual = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        # Below 2^-6 steps are of 2^-9: adding this leaves a whole number of them.
        small = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, small, usual.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def as_stored(x, TYPE: tl.constexpr):
    """f32 values as int8 (within 127), e4m3, f32 or bf16: to the nearest, ties to even."""
    if tl.int8 == TYPE:
        return ((x + ROUND) - ROUND).to(tl.int8)
    if tl.float8e4nv == TYPE:
        return as_e4m3(x)
    return as_type(x, TYPE)


@triton.jit
def scale_and_inverse(largest, steps):
    """largest / steps and steps / largest; 0 and 0 where it is tiny, NaN and 0 where it is NaN."""
    counts = largest >= TINY
    divisor = tl.where(counts, largest, 1.0)
    scale = tl.where(counts, tl.div_rn(divisor, steps), 0.0)
    scale = tl.where(largest == largest, scale, float("nan"))
    return scale, tl.where(counts, tl.div_rn(steps, divisor), 0.0)


@triton.jit
def dot(a, b, sums):
    """Return sums + a [M, K] @ b [K, N], added in f32 (int32 of integers)."""
    if INTERPRETED and sums.dtype == tl.float32:
        return _in_order(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit
def _in_order(a, b, sums):
    """By halves of K, the first one first."""
    if a.shape[1] <= 32:
        return sums + tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    a = tl.permute(tl.reshape(a, [a.shape[0], 2, a.shape[1] // 2]), (0, 2, 1))
    b = tl.permute(tl.reshape(b, [2, b.shape[0] // 2, b.shape[1]]), (1, 2, 0))
    first_a, second_a = tl.split(a)
    first_b, second_b = tl.split(b)
    return _in_order(second_a, second_b, _in_order(first_a, first_b, sums))


@triton.jit
def whole_as(x, dtype: tl.constexpr):
    """Small whole numbers as an operand of `dot` beside one of f32 or bf16."""
    return x.to(tl.float32) if INTERPRETED else x.to(dtype)
