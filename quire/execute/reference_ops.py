"""The plain twin of each operation: one small NumPy function that says what it means.

Arithmetic is float32; rounding to a buffer's dtype is the caller's. A row of a result depends on
the same row of the inputs only, so products are taken row by row: slow, and the Row Rule holds
here too. Letters: R rows, K inputs, N outputs, D head_dim, P positions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.quant.fp8 import Fp8Matrix, quantize_fp8_by, quantize_fp8_rows
from quire.quant.int_rows import fma, grouped, quantize_rows
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]
Matrix = Float32s | IntMatrix | Fp8Matrix  # a weight [N, K] in its dtype, or in few bits

ONE = np.float32(1)
HALF = np.float32(0.5)


def embed(table: Float32s, ids: Int32s) -> Float32s:
    """Return rows of table [V, N] by id (a token's, or a position): [R, N]."""
    y: Float32s = table[ids]
    return y


def norm(
    x: Float32s,
    weight: Float32s | None,
    *,
    eps: float,
    form: str,
    bias: Float32s | None,
    group: int,
) -> Float32s:
    """RMS or layer norm of x [R, N], or of each run of `group` columns by itself."""
    runs = x.reshape(len(x), -1, group or x.shape[1])
    if form == "layer":
        runs = runs - runs.mean(axis=-1, keepdims=True)
    mean_square = (runs * runs).mean(axis=-1, keepdims=True)
    y = runs * (ONE / np.sqrt(mean_square + np.float32(eps)))
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    normed: Float32s = y.reshape(x.shape)
    return normed


def linear(x: Float32s, weight: Float32s, bias: Float32s | None) -> Float32s:
    """x [R, K] @ weight [N, K].T (+ bias [N]): [R, N]."""
    y = np.empty((len(x), len(weight)), np.float32)
    for row in range(len(x)):
        y[row] = weight @ np.ascontiguousarray(x[row])
    return y if bias is None else y + bias


def product(x: Float32s, weight: Matrix, bias: Float32s | None) -> Float32s:
    """x [R, K] by a weight [N, K] as it is kept (+ bias [N]): [R, N]."""
    if isinstance(weight, Fp8Matrix):
        return fp8_linear(x, weight, bias)
    if isinstance(weight, IntMatrix):
        return int_linear(x, weight, bias)
    return linear(x, weight, bias)


def int_linear(x: Float32s, weight: IntMatrix, bias: Float32s | None) -> Float32s:
    """x [R, K], made integers, by an integer weight [N, K] (+ bias [N]): [R, N].

    Sums of a group's products are whole numbers below 2^24 and so exact in float32, in any order.
    They are folded with fused multiply-adds in the order of K: by weight group where a scheme has
    groups, then by activation group; one scale a channel comes last.
    """
    rows = quantize_rows(x)
    size = weight.scheme.group or ACTIVATION_GROUP
    activations = grouped(rows.values, ACTIVATION_GROUP)  # [R, groups, 128]
    weights = grouped(weight.values, ACTIVATION_GROUP)
    y = np.zeros((len(x), len(weight.values)), np.float32)
    for g in range(activations.shape[1]):
        scales = rows.scales[:, g, None]
        if not weight.scheme.group:
            y = fma(activations[:, g] @ weights[:, g].T, scales, y)
            continue
        total = np.zeros_like(y)
        for first in range(0, ACTIVATION_GROUP, size):
            index = (g * ACTIVATION_GROUP + first) // size
            if index >= weight.scales.shape[1]:
                break
            part = slice(first, first + size)
            sums = activations[:, g, part] @ weights[:, g, part].T
            total = fma(sums, weight.scales[:, index], total)
        y = fma(total, scales, y)
    if not weight.scheme.group:
        y = y * weight.scales[:, 0]
    return y if bias is None else y + bias


def fp8_linear(x: Float32s, weight: Fp8Matrix, bias: Float32s | None) -> Float32s:
    """x [R, K], made fp8, by an fp8 weight [N, K] (+ bias [N]): [R, N]."""
    by_block = bool(weight.scheme.group)
    if weight.input_scale is not None:
        rows = quantize_fp8_by(x, weight.input_scale)
    else:
        rows = quantize_fp8_rows(x, by_block=by_block)
    return fp8_product(rows, (weight.values, weight.scales), bias, blocks=(by_block, by_block))


def fp8_product(
    rows: tuple[Float32s, Float32s],
    weight: tuple[Float32s, Float32s],
    bias: Float32s | None,
    *,
    blocks: tuple[bool, bool],
) -> Float32s:
    """Return rows [R, K] by a weight [N, K], each as fp8 values and scales; blocks: whether the
    rows', and the weight's, scales are by block.

    Sums of 128 columns are added in the order of K. Scales of blocks, [R, groups] of rows and
    [blocks of 128 outputs, groups] of a weight, multiply each sum, in one step with the addition.
    Others, [R or 1, 1] and [N or 1, 1], come last, the rows' before the weight's.
    """
    (x, x_scales), (w, w_scales), (by_rows, by_weight) = rows, weight, blocks
    parts, weights = grouped(x, ACTIVATION_GROUP), grouped(w, ACTIVATION_GROUP)
    y = np.zeros((len(x), len(w)), np.float32)
    for g in range(parts.shape[1]):
        factor = np.ones_like(y)
        if by_rows:
            factor = factor * x_scales[:, g, None]
        if by_weight:
            factor = factor * np.repeat(w_scales[:, g], ACTIVATION_GROUP)[: len(w)]
        y = fma(linear(parts[:, g], np.ascontiguousarray(weights[:, g]), None), factor, y)
    if not by_rows:
        y = y * x_scales
    if not by_weight:
        y = y * w_scales.T
    return y if bias is None else y + bias


def rope(x: Float32s, cos: Float32s, sin: Float32s, *, heads: int, head_dim: int) -> Float32s:
    """Turn the pairs (i, i + half) of each head of x [R, heads * D]; cos, sin [R, half]."""
    half = cos.shape[1]
    y = x.reshape(len(x), heads, head_dim).copy()
    first, second = y[:, :, :half].copy(), y[:, :, half : 2 * half].copy()
    cos, sin = cos[:, None, :], sin[:, None, :]
    y[:, :, :half] = first * cos - second * sin
    y[:, :, half : 2 * half] = second * cos + first * sin
    return y.reshape(x.shape)


def activation(gate: Float32s, up: Float32s | None, *, form: str) -> Float32s:
    """form(gate), times up where there is one."""
    y = _activated(gate, form)
    return y if up is None else y * up


def add(x: Float32s, y: Float32s) -> Float32s:
    """x + y."""
    return x + y


def scale(x: Float32s, factor: float) -> Float32s:
    """x * factor."""
    return np.multiply(x, np.float32(factor), dtype=np.float32)


def soft_cap(x: Float32s, cap: float) -> Float32s:
    """cap * tanh(x / cap): next to x where it is small, never beyond cap."""
    y: Float32s = np.tanh(x / np.float32(cap)) * np.float32(cap)
    return y


def copy(x: Float32s) -> Float32s:
    """x itself: what changes is the dtype it is stored in."""
    return x


def gather_rows(x: Float32s, rows: Int32s) -> Float32s:
    """Return rows of x by index."""
    y: Float32s = x[rows]
    return y


def _activated(x: Float32s, form: str) -> Float32s:
    y: Float32s
    if form == "silu":
        with np.errstate(over="ignore"):
            y = np.divide(x, ONE + np.exp(-x), dtype=np.float32)
    elif form == "relu":
        y = np.maximum(x, np.float32(0))
    elif form == "gelu":
        scaled = np.multiply(x, np.float32(0.5**0.5), dtype=np.float32)
        erf = np.array([math.erf(value) for value in scaled.flat], np.float32)
        y = HALF * x * (ONE + erf.reshape(x.shape))
    elif form == "gelu_tanh":
        inner = np.float32((2 / math.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
        y = np.multiply(HALF * x, ONE + np.tanh(inner), dtype=np.float32)
    else:
        raise ValueError(f"activation {form!r}; silu, relu, gelu and gelu_tanh exist")
    return y
