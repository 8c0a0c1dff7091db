"""How f32 becomes a narrower type: to the nearest, ties to even, on devices and in the interpreter.

The interpreter cuts bits off where devices round, so there the rounding is done on integers first,
after which nothing is left to cut. Always holds: NaN stays NaN. Knows no rows.
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
def for_dot(x):
    """An operand of tl.dot: as it is, but f32 where the interpreter would multiply bits."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x
