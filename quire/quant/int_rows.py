"""Shared arithmetic of integer matrix products, in NumPy: quantized activations, fused steps.

A row is split into groups of 128 elements. The scale of a group is absmax / 127, its integers are
rint(x * (127 / absmax)), in float32. A group with absmax below TINY counts as zeros with scale 0; a
group with an infinity or NaN has scale NaN and zeros, so all results of its row are NaN. Knows no
layout. Invariant: the kernels compute the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.quant.scheme import ACTIVATION_GROUP

Float32s = NDArray[np.float32]

TINY = np.float32(2.0**-100)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntRows:
    """Quantized rows: whole numbers [R, K] from -127 to 127, and scales [R, groups of 128].

    The numbers are held in f32, in which their products are exact.
    """

    values: Float32s
    scales: Float32s


def grouped(values: Float32s, group: int) -> Float32s:
    """Reshape [R, K] to [R, groups, group], padding the last group with zeros."""
    rows, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % group)))
    return padded.reshape(rows, -1, group)


def scale_and_inverse(largest: Float32s, steps: float) -> tuple[Float32s, Float32s]:
    """Return largest / steps and steps / largest: 0 and 0 if tiny, NaN and 0 if not finite."""
    finite = np.isfinite(largest)
    counts = finite & (largest >= TINY)
    divisor = np.where(counts, largest, np.float32(1))
    scale = np.where(counts, divisor / np.float32(steps), np.float32(0))
    scale = np.where(finite, scale, np.float32(np.nan))
    inverse = np.where(counts, np.float32(steps) / divisor, np.float32(0))
    return scale.astype(np.float32), inverse.astype(np.float32)


def quantize_rows(x: Float32s) -> IntRows:
    """Quantize the rows of x [R, K] to integers."""
    groups = grouped(x, ACTIVATION_GROUP)
    # np.max propagates NaN, as the kernels' comparison of bits does.
    scales, inverse = scale_and_inverse(np.abs(groups).max(axis=2), 127.0)
    finite = np.where(np.isfinite(groups), groups, np.float32(0))
    values = np.rint(finite * inverse[:, :, None])
    return IntRows(
        values=np.ascontiguousarray(values.reshape(len(x), -1)[:, : x.shape[1]]), scales=scales
    )


def fma(a: Float32s, b: Float32s, c: Float32s) -> Float32s:
    """Return a * b + c in float32, rounded once.

    The product is exact in float64. The sum is not: its last bit is set if it was inexact (rounding
    to odd), so that rounding it to float32 gives the result of a single rounding.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + addend
        part = total - product  # the addend as rounded in the sum; exact two-sum
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (lost != 0) & ((bits & 1) == 0)
        toward = np.where((lost > 0) == (total > 0), 1, -1)
        odd = np.where(inexact, bits + toward, bits).view(np.float64)
        return odd.astype(np.float32)
