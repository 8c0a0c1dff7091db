"""Quantize weights and activations to fp8 (e4m3) in NumPy: the reference for the kernels.

The scale of a row, of 128 elements of it, or of a 128 x 128 block of a weight is absmax / 448, and
the values are x * (448 / absmax), in float32, rounded to the nearest e4m3 value (ties to even).
Tiny and non-finite values are handled as in int_rows.py. If a checkpoint fixes the scale of
activations, values are x * (1 / scale), clipped to 448. Knows no layout. Invariant: PyTorch and the
Triton kernels produce the same values and scales, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.quant.int_rows import grouped, scale_and_inverse
from quire.quant.scheme import ACTIVATION_GROUP, Scheme

Float32s = NDArray[np.float32]

LARGEST = np.float32(448)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matrix:
    """A weight [N, K] in e4m3: element (n, k) is values[n, k] times its scale.

    values: f32 [N, K], each an e4m3 value. scales: f32 [N, 1] for a scale per row, or [ceil(N /
    128), ceil(K / 128)] for blocks. input_scale: the fixed scale of activations if the scheme is
    static, else None.
    """

    scheme: Scheme
    values: Float32s
    scales: Float32s
    input_scale: np.float32 | None = None

    def dequantized(self) -> Float32s:
        """Return the elements as f32 [N, K]."""
        rows, columns = self.values.shape
        group = self.scheme.group
        if not group:
            return np.multiply(self.values, self.scales, dtype=np.float32)
        by_row = np.repeat(self.scales, group, axis=0)[:rows]
        return np.multiply(self.values, np.repeat(by_row, group, axis=1)[:, :columns])


def e4m3(x: Float32s) -> Float32s:
    """Round f32 to the nearest e4m3 value, clipping to 448."""
    x = np.clip(x, -LARGEST, LARGEST)
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # subnormal below 2^-6: constant step
    step = np.ldexp(np.float32(1), exponent - 3)
    rounded: Float32s = np.rint(x / step) * step
    return rounded


def _of_codes() -> Float32s:
    """Return the value of each byte: sign, 4-bit exponent (bias 7), 3 bits; 0x7F, 0xFF are NaN."""
    code = np.arange(128)
    exponent, fraction = code >> 3, (code & 7).astype(np.float32)
    small = np.ldexp(fraction, -9)
    usual = np.ldexp(8 + fraction, exponent - 10)
    half = np.where(exponent == 0, small, usual).astype(np.float32)
    half[127] = np.nan
    return np.concatenate([half, -half])


OF_CODES = _of_codes()


def quantize_fp8(w: Float32s, scheme: Scheme) -> Fp8Matrix:
    """Quantize the weight w [N, K] to e4m3, with the scheme's scales."""
    if not scheme.group:
        values, scales = quantize_fp8_rows(w, by_block=False)
        return Fp8Matrix(scheme=scheme, values=values, scales=scales)
    (rows, columns), group = w.shape, scheme.group
    padded = np.pad(w, ((0, -rows % group), (0, -columns % group)))
    blocks = padded.reshape(padded.shape[0] // group, group, -1, group)
    scales, inverse = scale_and_inverse(np.abs(blocks).max(axis=(1, 3)), float(LARGEST))
    finite = np.where(np.isfinite(blocks), blocks, np.float32(0))
    values = e4m3(finite * inverse[:, None, :, None]).reshape(padded.shape)
    kept = np.ascontiguousarray(values[:rows, :columns])
    return Fp8Matrix(scheme=scheme, values=kept, scales=scales)


def quantize_fp8_rows(x: Float32s, *, by_block: bool) -> tuple[Float32s, Float32s]:
    """Quantize rows x; return values [R, K] and scales [R, 1], or [R, groups of 128] by block."""
    groups = grouped(x, ACTIVATION_GROUP) if by_block else x[:, None, :]
    scales, inverse = scale_and_inverse(np.abs(groups).max(axis=2), float(LARGEST))
    finite = np.where(np.isfinite(groups), groups, np.float32(0))
    values = e4m3(finite * inverse[:, :, None])
    return np.ascontiguousarray(values.reshape(len(x), -1)[:, : x.shape[1]]), scales


def quantize_fp8_by(x: Float32s, scale: np.float32) -> tuple[Float32s, Float32s]:
    """Quantize rows x by a given scale.

    Returns values [R, K], NaN for a non-finite x, and the scale as [1, 1].
    """
    with np.errstate(over="ignore"):
        values = e4m3(np.where(np.isfinite(x), x, np.float32(0)) * (np.float32(1) / scale))
    return np.where(np.isfinite(x), values, np.float32(np.nan)), np.full((1, 1), scale, np.float32)
