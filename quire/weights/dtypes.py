"""Storage types of checkpoint tensors, and conversion to float32 and bfloat16.

bfloat16 is stored as uint16 (the upper half of a float32), since NumPy has no such type. Rounding
is to nearest, ties to even; NaN stays NaN, quiet.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]
Uint16s = NDArray[np.uint16]

# NumPy type of each readable type; bf16 as bits.
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
)
FP8 = "f8_e4m3"
BYTE_TYPE_BYTES = 1  # size of an fp8 element, and of the dtypes of masks


def bf16_bits(values: Float32s) -> Uint16s:
    """Convert float32 to bfloat16 bits of the same shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def from_bf16_bits(bits: Uint16s) -> Float32s:
    """Convert bfloat16 bits to float32 of the same shape."""
    wide = bits.astype(np.uint32) << np.uint32(16)
    return np.asarray(wide).view(np.float32)


def round_to_bf16(values: Float32s) -> Float32s:
    """Round float32 values to the nearest bfloat16 values."""
    return from_bf16_bits(bf16_bits(values))
