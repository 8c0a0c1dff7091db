"""Plain twins, in NumPy, of kernels that do what the reference executor does not know yet.

Each says what its kernel means: where it rounds, and what is added to what in which order, but for
the order within one tile's f32 sums. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.execute.reference_ops import activation
from quire.quant.int_rows import fma, grouped, scale_and_inverse
from quire.quant.int_weights import IntMatrix

Float32s = NDArray[np.float32]

FP8_GROUP = 128
FP8_LARGEST = np.float32(448)


def weight_only(x: Float32s, weight: IntMatrix, bias: Float32s | None) -> Float32s:
    """x [R, K], as it is, by an int4 weight [N, K]: sums of a group, then its scale, in order."""
    group = weight.scheme.group
    rows, values = grouped(x, group), grouped(weight.values, group)
    y = np.zeros((len(x), len(weight.values)), np.float32)
    for g in range(rows.shape[1]):
        y = fma(rows[:, g] @ values[:, g].T, weight.scales[:, g], y)
    return y if bias is None else y + bias


def grouped_rows(x: Float32s, weights: Float32s, ids: NDArray[np.integer]) -> Float32s:
    """Each row of x [R, K] by its matrix of weights [count, N, K]; zeros where its id is -1."""
    y = np.zeros((len(x), weights.shape[1]), np.float32)
    for row, matrix in enumerate(ids):
        if 0 <= matrix < len(weights):
            y[row] = weights[matrix] @ x[row]
    return y


def experts(
    x: Float32s,
    gate_up: Float32s,
    down: Float32s,
    ids: NDArray[np.integer],
    shares: Float32s,
    *,
    form: str,
    stored: Callable[[Float32s], Float32s],
) -> Float32s:
    """A layer of experts: x [R, H], gate_up [E, 2 M, H], down [E, H, M], ids and shares [R, C].
    stored: rounds what lies between the products to its dtype."""
    y = np.zeros_like(x)
    middle = down.shape[2]
    for choice in range(ids.shape[1]):
        both = grouped_rows(x, gate_up, ids[:, choice])
        hidden = stored(activation(both[:, :middle], both[:, middle:], form=form))
        answers = stored(grouped_rows(hidden, down, ids[:, choice]))
        y = fma(answers, shares[:, choice, None], y)
    return y


def adapted(
    y: Float32s,
    x: Float32s,
    shrink: Float32s,
    expand: Float32s,
    factors: Float32s,
    ids: NDArray[np.integer],
    *,
    stored: Callable[[Float32s], Float32s],
) -> Float32s:
    """y [R, N] + factor * expand (shrink x) of each row's adapter; rows without keep y."""
    low = stored(grouped_rows(x, shrink, ids))
    added = fma(grouped_rows(low, expand, ids), factors[np.maximum(ids, 0), None], y)
    return np.where((ids >= 0)[:, None], added, y)


def e4m3(x: Float32s) -> Float32s:
    """f32 rounded to the nearest that fp8 e4m3 has, those beyond 448 to 448."""
    x = np.clip(x, -FP8_LARGEST, FP8_LARGEST)
    exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # below 2^-6 steps stay the same
    step = np.ldexp(np.float32(1), exponent - 3)
    rounded: Float32s = np.rint(x / step) * step
    return rounded


def fp8_rows(x: Float32s, kind: str) -> tuple[Float32s, Float32s]:
    """Values [R, K] and scales of rows in fp8: [R, 1] by token, [R, groups] by block."""
    groups = grouped(x, FP8_GROUP)
    if kind == "token":
        groups = groups.reshape(len(x), 1, -1)
    scales, inverse = scale_and_inverse(np.abs(groups).max(axis=2), float(FP8_LARGEST))
    finite = np.where(np.isfinite(groups), groups, np.float32(0))
    values = e4m3(finite * inverse[:, :, None])
    return values.reshape(len(x), -1)[:, : x.shape[1]], scales


def fp8_linear(
    x: Float32s, x_scales: Float32s, w: Float32s, w_scales: Float32s, bias: Float32s | None
) -> Float32s:
    """x [R, K] by w [N, K], values as fp8 has them. x_scales: [R or 1, 1] or [R, groups]; w_scales:
    [N or 1, 1], or [blocks of 128 outputs, groups]."""
    rows, weights = grouped(x, FP8_GROUP), grouped(w, FP8_GROUP)
    by_row, by_weight = x_scales.shape[1] > 1, w_scales.shape[1] > 1
    if by_weight:
        w_scales = np.repeat(w_scales, FP8_GROUP, axis=0)[: len(w)]
    y = np.zeros((len(x), len(w)), np.float32)
    for g in range(rows.shape[1]):
        factor = np.ones_like(y)
        if by_row:
            factor = factor * x_scales[:, g, None]
        if by_weight:
            factor = factor * w_scales[:, g]
        y = fma(rows[:, g] @ weights[:, g].T, factor, y)
    if not by_row:
        y = y * x_scales
    if not by_weight:
        y = y * w_scales.T
    return y if bias is None else y + bias
