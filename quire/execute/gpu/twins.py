"""Plain twins, in NumPy, of kernels that do what the reference executor does not know yet.

Each says what its kernel means: where it rounds, and what is added to what in which order, but for
the order within one tile's f32 sums. Knows no tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.quant.int_rows import fma, grouped
from quire.quant.int_weights import IntMatrix

Float32s = NDArray[np.float32]


def weight_only(x: Float32s, weight: IntMatrix, bias: Float32s | None) -> Float32s:
    """x [R, K], as it is, by an int4 weight [N, K]: sums of a group, then its scale, in order."""
    group = weight.scheme.group
    rows, values = grouped(x, group), grouped(weight.values, group)
    y = np.zeros((len(x), len(weight.values)), np.float32)
    for g in range(rows.shape[1]):
        y = fma(rows[:, g] @ values[:, g].T, weight.scales[:, g], y)
    return y if bias is None else y + bias


def grouped_rows(x: Float32s, weights: Float32s, ids: NDArray[np.integer]) -> Float32s:
    """Return each row of x [R, K] by its matrix of weights [count, N, K]; zeros where its id is
    -1."""
    y = np.zeros((len(x), weights.shape[1]), np.float32)
    for row, matrix in enumerate(ids):
        if 0 <= matrix < len(weights):
            y[row] = weights[matrix] @ x[row]
    return y
