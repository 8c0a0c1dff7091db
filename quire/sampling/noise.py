"""Noise and exact arithmetic of sampling, repeated bit for bit by every implementation.

Part of the numerics version: changing a constant changes every seeded answer. It uses only 32- and
64-bit integer operations and single f32 multiplications and additions, each rounded once (no fused
multiply-add, no library functions), so NumPy, C++ on any instruction set and a GPU agree.

Noise of a token: (seed, stream, position) -> a 64-bit key (splitmix64's finalizer twice); key and
token id -> 32 bits (two keyed rounds of multiply and xor-shift); the bits -> w, an f32 in (0, 1)
with 24 significant bits, at least 2^-33 and at most 1 - 2^-24; noise = -log(-log(1 - w)). Using 1 -
w keeps the upper tail fine: noise reaches 22.9, so tokens of probability 1e-9 are still drawn at
the right rate.

Sums of probabilities: exp(l - max) is rounded to a multiple of 2^-34 (a "mass") and masses are
added in f64. Every partial sum of up to 2^19 masses is exact, so no order, chunk, lane or thread
can change it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MAX_VOCAB = 2**19  # more masses than this could round in f64
MASS_UNIT = 2.0**-34

LOG_COEFFICIENTS = (  # (log(1 + f) - f) / f^2 on [sqrt(1/2) - 1, sqrt(2) - 1], constant first
    -0.50000083,
    0.33334357,
    -0.24983427,
    0.19918072,
    -0.1710234,
    0.16081917,
    -0.10435568,
)
EXP2_COEFFICIENTS = (  # 2^f on [-1/2, 1/2], constant first
    1.0,
    0.6931472,
    0.2402265,
    0.05550327,
    0.009618025,
    0.0013400433,
    0.00015469732,
)
LN2 = np.float32(0.6931472)
LOG2_E = np.float32(1.442695)
EXP_FLOOR = np.float32(-40.0)  # in powers of two; anything below has mass 0
_ROUND = np.float32(12_582_912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
_MASS_ROUND = 1.5 * 2.0**52 * MASS_UNIT
_SQRT_HALF_BITS = 0x3F3504F3


def gumbel(seed: int, stream: int, position: int, *, token_ids: NDArray[np.integer]) -> Floats:
    """Return standard Gumbel noise of each token id, f32 of token_ids' shape."""
    return minus_log(
        minus_log(uniform(seed, stream, position, token_ids=token_ids), one_minus=True)
    )


def uniform(seed: int, stream: int, position: int, *, token_ids: NDArray[np.integer]) -> Floats:
    """Return w of each token id: f32 in (0, 1)."""
    bits = hash_bits(seed, stream, position, token_ids=token_ids)
    high = (bits >> np.uint32(16)).astype(np.float32) * np.float32(65_536.0)
    low = (bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    w = (high + low) * np.float32(2.0**-32)
    return np.minimum(w, np.float32(1.0 - 2.0**-24))


def hash_bits(
    seed: int, stream: int, position: int, *, token_ids: NDArray[np.integer]
) -> NDArray[np.uint32]:
    """Return 32 bits of each token id; a bijection of the id for one key."""
    key = row_key(seed, stream, position)
    x = token_ids.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
    x = _scramble(x, (16, 0x7FEB352D, 15, 0x846CA68B, 16))
    x = x + np.uint32(key >> 32)
    return _scramble(x, (16, 0x21F0AAAD, 15, 0xD35A2D97, 15))


def row_key(seed: int, stream: int, position: int) -> int:
    """Return the 64-bit key of a row; for one seed, distinct for distinct (stream, position)."""
    place = (stream & 0xFFFFFFFF) << 32 | (position & 0xFFFFFFFF)
    return _finalize(_finalize((seed + 0x9E3779B97F4A7C15) & (2**64 - 1)) ^ place)


def minus_log(x: Floats, *, one_minus: bool = False) -> Floats:
    """Return -log(x), or -log(1 - x), of a normal positive argument; error below 1e-6."""
    y = np.float32(1.0) - x if one_minus else x
    bits = y.view(np.int32)
    exponent = (bits - np.int32(_SQRT_HALF_BITS)) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - np.float32(1.0)
    if one_minus:
        f = np.where(exponent == 0, -x, f)  # 1 - x was rounded, x was not
    poly = np.full_like(f, LOG_COEFFICIENTS[-1])
    for coefficient in LOG_COEFFICIENTS[-2::-1]:
        poly = poly * f + np.float32(coefficient)
    log1p = poly * (f * f) + f
    result: Floats = -(exponent.astype(np.float32) * LN2 + log1p)
    return result


def mass(x: Floats) -> NDArray[np.float64]:
    """Return exp(x) of x <= 0 as a multiple of 2^-34; 0 for x = -inf."""
    t = np.maximum(x * LOG2_E, EXP_FLOOR)
    n = (t + _ROUND) - _ROUND
    f = t - n
    poly = np.full_like(f, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        poly = poly * f + np.float32(coefficient)
    power = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return mass_multiple((poly * power).astype(np.float64))


def mass_multiple(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round x of [0, 1] to multiples of 2^-34, which have exact sums in any order."""
    result: NDArray[np.float64] = (x + _MASS_ROUND) - _MASS_ROUND
    return result


def _finalize(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ x >> 31


def _scramble(x: NDArray[np.uint32], steps: tuple[int, int, int, int, int]) -> NDArray[np.uint32]:
    first, multiplier, second, other, third = steps
    x = (x ^ x >> np.uint32(first)) * np.uint32(multiplier)
    x = (x ^ x >> np.uint32(second)) * np.uint32(other)
    return x ^ x >> np.uint32(third)
