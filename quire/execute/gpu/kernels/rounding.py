"""What devices do and Triton's interpreter does not: rounding to narrow types, products of tiles.

The interpreter cuts bits off where devices round to the nearest, so there the rounding is done on
integers first. Its products of bf16 are of the bits, and those of f32 have an order that depends
on the shape, so there they are sums in the order of K. Always holds: NaN stays NaN. Knows no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def dot(a, b, sums):
    """sums + a [M, K] @ b [K, N], added in f32 (int32 of integers)."""
    if INTERPRETED and sums.dtype == tl.float32:
        a, b = a.to(tl.float32), b.to(tl.float32)
        return sums + tl.sum(a[:, :, None] * b[None, :, :], axis=1)
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit
def whole_as(x, dtype: tl.constexpr):
    """Small whole numbers as an operand of `dot` beside one of f32 or bf16."""
    return x.to(tl.float32) if INTERPRETED else x.to(dtype)
