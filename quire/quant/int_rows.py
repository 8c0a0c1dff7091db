"""The arithmetic that integer products share, in NumPy: rows of activations, fused steps.

A row is cut into groups of 128 elements. Each has the scale absmax / 127 and the integers
rint(x * (127 / absmax)), in float32. A group whose absmax is below TINY counts as zeros, scale 0;
one that holds an infinity or NaN has the scale NaN and zeros, so its row's results are all NaN.
Knows no layout. Always holds: what is said here is bit for bit what the kernels do.
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
    """Rows as integers: [R, K] of whole numbers from -127 to 127 (held in f32, where products of
    them are exact), and their scales [R, groups of 128]."""

    values: Float32s
    scales: Float32s


def grouped(values: Float32s, group: int) -> Float32s:
    """[R, K] as [R, groups, group], the last one filled up with zeros."""
    rows, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % group)))
    return padded.reshape(rows, -1, group)


def scale_and_inverse(largest: Float32s, steps: float) -> tuple[Float32s, Float32s]:
    """largest / steps and steps / largest; 0 and 0 where it is tiny, NaN and 0 where not finite."""
    finite = np.isfinite(largest)
    counts = finite & (largest >= TINY)
    divisor = np.where(counts, largest, np.float32(1))
    scale = np.where(counts, divisor / np.float32(steps), np.float32(0))
    scale = np.where(finite, scale, np.float32(np.nan))
    inverse = np.where(counts, np.float32(steps) / divisor, np.float32(0))
    return scale.astype(np.float32), inverse.astype(np.float32)


def quantize_rows(x: Float32s) -> IntRows:
    """Rows of x [R, K] as integers."""
    groups = grouped(x, ACTIVATION_GROUP)
    # np.max hands on a NaN, as the kernels' comparison of bits does.
    scales, inverse = scale_and_inverse(np.abs(groups).max(axis=2), 127.0)
    finite = np.where(np.isfinite(groups), groups, np.float32(0))
    values = np.rint(finite * inverse[:, :, None])
    return IntRows(
        values=np.ascontiguousarray(values.reshape(len(x), -1)[:, : x.shape[1]]), scales=scales
    )


def fma(a: Float32s, b: Float32s, c: Float32s) -> Float32s:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is not: its last bit is set where something was cut
    off (rounding to odd), so that rounding it again to float32 gives what one rounding gives.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + addend
        part = total - product  # what the sum took of the addend; two-sum, exact
        lost = (product - (total - part)) + (addend - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & (lost != 0) & ((bits & 1) == 0)
        toward = np.where((lost > 0) == (total > 0), 1, -1)
        odd = np.where(inexact, bits + toward, bits).view(np.float64)
        return odd.astype(np.float32)
