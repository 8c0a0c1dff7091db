"""Noise and exact sums of token choice, as Triton functions: the bits of quire/sampling/noise.py.

Integer steps, and f32 multiplications and additions each rounded once, so kernels that use these
are compiled without fused multiply-adds (launch.EXACT). Masses are whole numbers of 2^-34, int64,
so that no order of adding them matters. Knows no rows and no parameters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.sampling import noise

LN2 = tl.constexpr(float(noise.LN2))
LOG2_E = tl.constexpr(float(noise.LOG2_E))
EXP_FLOOR = tl.constexpr(float(noise.EXP_FLOOR))
UNITS = tl.constexpr(1 / noise.MASS_UNIT)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
LOG_0, LOG_1, LOG_2, LOG_3, LOG_4, LOG_5, LOG_6 = map(tl.constexpr, noise.LOG_COEFFICIENTS)
EXP_0, EXP_1, EXP_2, EXP_3, EXP_4, EXP_5, EXP_6 = map(tl.constexpr, noise.EXP2_COEFFICIENTS)
ROUND = tl.constexpr(12_582_912.0)  # added and taken off, leaves the nearest whole f32
ROUND_F64 = tl.constexpr(1.5 * 2.0**52)
LARGEST_W = tl.constexpr(1.0 - 2.0**-24)
LOW_HALF = tl.constexpr(0xFFFF)


@triton.jit
def row_key(seed, stream, position):
    """Return the uint64 key of int64 seeds, int32 streams and positions."""
    place = stream.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    place = place | position.to(tl.uint32, bitcast=True).to(tl.uint64)
    return _finalize(_finalize(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15) ^ place)


@triton.jit
def _finalize(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel(key, token_ids):
    """Return standard Gumbel noise of int32 ids, f32, for a row's key."""
    x = token_ids.to(tl.uint32, bitcast=True) ^ (key & 0xFFFFFFFF).to(tl.uint32)
    x = _scramble(x, 16, 0x7FEB352D, 15, 0x846CA68B, 16)
    x = x + (key >> 32).to(tl.uint32)
    bits = _scramble(x, 16, 0x21F0AAAD, 15, 0xD35A2D97, 15)
    high = (bits >> 16).to(tl.int32).to(tl.float32) * 65536.0
    low = (bits & LOW_HALF).to(tl.int32).to(tl.float32) + 0.5
    w = tl.minimum((high + low) * 2.3283064365386963e-10, LARGEST_W)
    return minus_log(minus_log(w, True), False)


@triton.jit
def _scramble(
    x,
    FIRST: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    SECOND: tl.constexpr,
    OTHER: tl.constexpr,
    THIRD: tl.constexpr,
):
    x = (x ^ (x >> FIRST)) * MULTIPLIER
    x = (x ^ (x >> SECOND)) * OTHER
    return x ^ (x >> THIRD)


@triton.jit
def minus_log(x, ONE_MINUS: tl.constexpr):
    """-log(x), or -log(1 - x), of f32 tensors: x normal and positive (1 - x likewise)."""
    y = 1.0 - x if ONE_MINUS else x
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    if ONE_MINUS:
        f = tl.where(exponent == 0, -x, f)  # 1 - x was rounded, x was not
    series = f * LOG_6 + LOG_5
    series = series * f + LOG_4
    series = series * f + LOG_3
    series = series * f + LOG_2
    series = series * f + LOG_1
    series = series * f + LOG_0
    return -(exponent.to(tl.float32) * LN2 + (series * (f * f) + f))


@triton.jit
def mass(x):
    """exp(x) of f32 x <= 0 in units of 2^-34, int64; 0 for x = -inf."""
    t = tl.maximum(x * LOG2_E, EXP_FLOOR)
    n = (t + ROUND) - ROUND
    f = t - n
    series = f * EXP_6 + EXP_5
    series = series * f + EXP_4
    series = series * f + EXP_3
    series = series * f + EXP_2
    series = series * f + EXP_1
    series = series * f + EXP_0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    units = (series * power).to(tl.float64) * UNITS
    return ((units + ROUND_F64) - ROUND_F64).to(tl.int64)
