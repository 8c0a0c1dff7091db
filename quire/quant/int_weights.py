"""Quantize weights to integers in NumPy: the reference for native/src/pack_ints.cc.

int8: a row's scale is absmax / 127, its integers are rint(w * (127 / absmax)). int4: for each group
several clip ratios are tried; each gives integers, the least-squares scale for them (rounded to
bf16), and its error; the scale with the least error is kept, and the integers are rounded again
with it. With zero points the range is [-z, 15 - z], else [-8, 7]. Scales of groups of 32 and 64
without zero points are integer multiples of a step shared by 128 elements of a row, so that
products can be summed as integers over these 128 (`in_steps`). Tiny and non-finite rows or groups
are handled as in int_rows.py; a group with an element of at least HUGE counts as not finite, since
errors are squared. Sums run over a group's elements in order. Needs no calibration text; knows no
layout and no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.quant.int_rows import TINY, grouped, scale_and_inverse
from quire.quant.scheme import ACTIVATION_GROUP, Scheme

Float32s = NDArray[np.float32]

HUGE = np.float32(2.0**60)
# Minimum mean magnitude of a row's integers: below it the rounding error exceeds a tenth of a
# typical element (for a normal distribution), more than int4 with groups of 32 loses. The usual
# mean is about 30.
MIN_MEAN_STEPS = np.float32(2.3)
# The largest magnitude of a group maps to minus this many steps; the lowest integer is -8.
CLIP_STEPS = tuple(np.float32(7 + 0.3125 * i) for i in range(12))
# With zero points: fraction of the range from the smallest to the largest element.
RANGE_SHARES = tuple(np.float32(1 - i / 32) for i in range(8))
# Allowed scales within 128 elements of a row, as all pairs (p, top): the largest scale is p / 64 of
# a power of two and `top` steps, the others are fewer steps. p is a * top, or twice that, with a at
# most 7: then a sum of 128 products of activations (127), weights (8) and steps (15), times a, is
# below 2^24, so that f32 holds each partial sum exactly, in any order.
STEPS = tuple(
    sorted(
        {
            a * top << shift: top
            for top in range(8, 16)
            for a in range(4, 8)
            for shift in (0, 1)
            if 64 <= a * top << shift <= 128
        }.items()
    )
)
MAX_STEPS = np.float32(15)
# Relative squared error of a group that 4 bits and bf16 scales represent without loss.
LOSSLESS_ERROR = np.float32(2.0**-16)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntMatrix:
    """A weight [N, K] as integers: element (n, k) is values[n, k] * scales[n, k // group].

    values: whole numbers in f32, -127 to 127 or -15 to 15 (zero point subtracted). scales: [N,
    groups], one group if the scheme has a scale per row. zeros: the subtracted zero points [N,
    groups], 8 if the scheme has none, 128 for int8.
    """

    scheme: Scheme
    values: Float32s
    scales: Float32s
    zeros: Float32s

    def dequantized(self) -> Float32s:
        """Return the elements as the products use them, f32 [N, K]."""
        group = self.scheme.group or self.values.shape[1]
        scales = np.repeat(self.scales, group, axis=1)[:, : self.values.shape[1]]
        return np.multiply(self.values, scales, dtype=np.float32)


def quantize_matrix(w: Float32s, scheme: Scheme) -> IntMatrix:
    """Quantize the weight w [N, K] by a scheme."""
    return _int8(w, scheme) if scheme.bits == 8 else _int4(w, scheme)


def coarse_rows(w: Float32s) -> int:
    """Count the rows of w [N, K] for which int8 is too coarse.

    In such a row a few elements are so large that, with one scale for all, the others are lost in
    rounding. Zeros are exact and do not count.
    """
    sizes = np.abs(w)
    largest = sizes.max(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        _, inverse = scale_and_inverse(largest, 127.0)
        few = sizes.sum(axis=1) * inverse < MIN_MEAN_STEPS * (sizes > 0).sum(axis=1)
    return int(np.count_nonzero(few & (largest >= TINY) & np.isfinite(largest)))


def _int8(w: Float32s, scheme: Scheme) -> IntMatrix:
    scales, inverse = scale_and_inverse(np.abs(w).max(axis=1), 127.0)
    finite = np.where(np.isfinite(w), w, np.float32(0))
    return IntMatrix(
        scheme=scheme,
        values=np.rint(finite * inverse[:, None]),
        scales=scales[:, None],
        zeros=np.full((len(w), 1), 128, np.float32),
    )


def _int4(w: Float32s, scheme: Scheme) -> IntMatrix:
    groups = grouped(w, scheme.group)  # [N, G, group]
    finite = np.abs(groups).max(axis=2) < HUGE  # False for NaN
    x = np.where(finite[:, :, None], groups, np.float32(0))
    if scheme.has_zero_points:
        scales, zeros = _zero_points(x)
    else:
        scales, zeros = _symmetric(x, scheme.group)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    values = _rounded(x, inverse, zeros)
    return IntMatrix(
        scheme=scheme,
        values=np.ascontiguousarray(values.reshape(len(w), -1)[:, : w.shape[1]]),
        scales=np.where(finite, scales, np.float32(np.nan)),
        zeros=zeros,
    )


def _symmetric(x: Float32s, group: int) -> tuple[Float32s, Float32s]:
    """Return scales and zero points (8) of groups x [N, G, group]."""
    at = np.abs(x).argmax(axis=2)[:, :, None]  # the first of equal ones
    largest = np.take_along_axis(x, at, axis=2)[:, :, 0]
    counts = np.abs(largest) >= TINY
    divisor = np.where(counts, largest, np.float32(1))
    zeros = np.full(largest.shape, 8, np.float32)
    tries = [(np.divide(-steps, divisor, dtype=np.float32), zeros) for steps in CLIP_STEPS]
    best = _best(x, tries)
    scales = np.where(counts, best.scales, np.float32(0))
    if group < ACTIVATION_GROUP:
        scales = _blocks_in_steps(x, scales, best)
    return scales, zeros


def _blocks_in_steps(x: Float32s, scales: Float32s, best: _Best) -> Float32s:
    """Convert scales [N, G] to multiples of their block's step.

    Blocks that the given scales represent without loss keep them, such as weights of 4 bits before.
    """
    squares = np.zeros(scales.shape, np.float32)
    for k in range(x.shape[2]):
        squares += x[:, :, k] * x[:, :, k]
    held = (scales == 0) | (best.errors + squares <= LOSSLESS_ERROR * squares)
    of_block = ACTIVATION_GROUP // x.shape[2]
    pad = -scales.shape[1] % of_block
    blocks, weights, kept = (
        np.pad(part, ((0, 0), (0, pad)), constant_values=fill).reshape(len(x), -1, of_block)
        for part, fill in ((scales, 0), (best.squares, 0), (held, True))
    )
    chosen = np.where(kept.all(axis=2, keepdims=True), blocks, in_steps(blocks, weights))
    return np.ascontiguousarray(chosen.reshape(len(x), -1)[:, : scales.shape[1]])


def in_steps(scales: Float32s, squares: Float32s) -> Float32s:
    """Convert scales [N, B, groups] to multiples of one step per block, as allowed by STEPS.

    Minimizes the sum of squares[..] * (change of scale)^2; takes the first of equal ones.
    """
    largest = np.abs(scales).max(axis=2, keepdims=True)
    unit = (largest.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32) / np.float32(64)
    unit = np.where(largest == 0, np.float32(1), unit)
    best = np.full(largest.shape, np.inf, np.float32)
    chosen = np.zeros_like(scales)
    for p, top in STEPS:
        size = unit * np.float32(p)
        step, inverse = size / np.float32(top), np.float32(top) / size
        steps = np.rint(np.clip(scales * inverse, -MAX_STEPS, MAX_STEPS))
        change = scales - step * steps
        error = np.zeros(largest.shape, np.float32)
        for g in range(scales.shape[2]):
            error[:, :, 0] += squares[:, :, g] * (change[:, :, g] * change[:, :, g])
        fits = np.abs(steps).max(axis=2, keepdims=True) == top
        better = fits & (error < best)
        best = np.where(better, error, best)
        chosen = np.where(better, step * steps, chosen)
    return chosen


def _zero_points(x: Float32s) -> tuple[Float32s, Float32s]:
    low = np.minimum(x.min(axis=2), np.float32(0))
    high = np.maximum(x.max(axis=2), np.float32(0))
    spread = high - low
    counts = spread >= TINY
    tries: list[tuple[Float32s, Float32s]] = []
    for share in RANGE_SHARES:
        span = np.where(counts, spread * share, np.float32(1))
        inverse = np.divide(np.float32(15), span, dtype=np.float32)
        zeros = np.rint(np.clip((-low * share) * inverse, np.float32(0), np.float32(15)))
        tries.append((inverse, zeros))
    best = _best(x, tries)
    none = np.float32(0)
    return np.where(counts, best.scales, none), np.where(counts, best.zeros, none)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    """The best choice of each group.

    scales: rounded to bf16. zeros: zero points. squares: sums of squares of the integers. errors:
    squared error minus the sum of squares of x, which is constant.
    """

    scales: Float32s
    zeros: Float32s
    squares: Float32s
    errors: Float32s


def _best(x: Float32s, tries: list[tuple[Float32s, Float32s]]) -> _Best:
    """Choose the inverse scales and zero points with the least error; the first of equal ones."""
    with np.errstate(all="ignore"):
        best = _fitted(x, *tries[0])
        for inverse, zeros in tries[1:]:
            other = _fitted(x, inverse, zeros)
            better = other.errors < best.errors
            best = _Best(
                scales=np.where(better, other.scales, best.scales),
                zeros=np.where(better, other.zeros, best.zeros),
                squares=np.where(better, other.squares, best.squares),
                errors=np.where(better, other.errors, best.errors),
            )
    return best


def _fitted(x: Float32s, inverse: Float32s, zeros: Float32s) -> _Best:
    """Return the least-squares scales of the integers, and their error."""
    q = _rounded(x, inverse, zeros)
    product = np.zeros(x.shape[:2], np.float32)
    square = np.zeros(x.shape[:2], np.float32)
    for k in range(x.shape[2]):
        product += x[:, :, k] * q[:, :, k]
        square += q[:, :, k] * q[:, :, k]
    scales = _round_bf16(product / square)
    errors = scales * (scales * square - (product + product))
    return _Best(scales=scales, zeros=zeros, squares=square, errors=errors)


def _rounded(x: Float32s, inverse: Float32s, zeros: Float32s) -> Float32s:
    low, high = -zeros, np.float32(15) - zeros
    with np.errstate(invalid="ignore", over="ignore"):
        q = np.clip(x * inverse[:, :, None], low[:, :, None], high[:, :, None])
    whole: Float32s = np.rint(q).astype(np.float32)
    return whole


def _round_bf16(values: Float32s) -> Float32s:
    bits = values.view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    rounded: Float32s = kept.view(np.float32)
    np.copyto(rounded, values, where=np.isnan(values))
    return rounded
