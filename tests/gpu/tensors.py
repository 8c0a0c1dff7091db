"""Tensors for kernel tests: NumPy conversion, bf16 as rounded f32, scratch filled with NaN."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from quire.weights.dtypes import round_to_bf16

Float32s = NDArray[np.float32]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# A bf16 result may round to the neighbouring value: one step of its eight bits.
BF16_STEP = 2.0**-7


def normal(rng: np.random.Generator, *shape: int, dtype: str = "f32") -> Float32s:
    """Return normal numbers representable in `dtype`."""
    return rounded(rng.standard_normal(shape).astype(np.float32), dtype)


def rounded(values: Float32s, dtype: str) -> Float32s:
    """Round to `dtype`."""
    return round_to_bf16(values) if dtype == "bf16" else values


def tensor(values: Float32s, dtype: str = "f32") -> torch.Tensor:
    """Return a tensor in its own memory."""
    return torch.from_numpy(np.array(values)).to(TYPES[dtype])


def wide(values: Float32s, dtype: str, *, pad: int = 3) -> torch.Tensor:
    """Return the tensor as columns of a wider buffer filled with NaN."""
    rows, columns = values.shape
    buffer = torch.full((rows, columns + 2 * pad), float("nan"), dtype=TYPES[dtype])
    buffer[:, pad : pad + columns] = tensor(values, dtype)
    return buffer[:, pad : pad + columns]


def empty(rows: int, columns: int, dtype: str = "f32") -> torch.Tensor:
    """Return columns of a buffer filled with NaN."""
    return wide(np.full((rows, columns), np.nan, np.float32), dtype)


def array(tensor: torch.Tensor) -> Float32s:
    """Convert to an f32 array."""
    return tensor.detach().to(torch.float32).numpy().copy()


def same_bits(x: Float32s, y: Float32s) -> bool:
    """Compare bit for bit; NaN equals NaN."""
    return bool(((x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))).all())
