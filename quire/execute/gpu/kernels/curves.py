"""Curves that kernels share, as Triton functions: tanh and the forms of activations.

Made of exp, erf and divisions rounded once, because what a library offers differs between devices
and the interpreter has none of it. Errors are a few of f32's last bits. Knows no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Of f32. Near 0 the series, elsewhere by exp(-2 |x|), which cannot overflow."""
    squared = x * x
    series = -0.008863235529902197 * squared + 0.021869488536155203
    series = series * squared - 0.05396825396825397
    series = series * squared + 0.13333333333333333
    series = series * squared - 0.3333333333333333
    near = x + x * squared * series
    power = tl.exp(-2.0 * tl.abs(x))
    far = tl.div_rn(1.0 - power, 1.0 + power)
    return tl.where(squared < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def activated(x, FORM: tl.constexpr):
    """silu, relu, gelu or gelu_tanh of f32."""
    if FORM == "silu":
        y = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif FORM == "relu":
        y = tl.where(x > 0, x, tl.where(x == x, 0.0, x))  # NaN stays NaN
    elif FORM == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(FORM == "gelu_tanh")
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return y
