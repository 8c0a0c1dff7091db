"""A weight as its scheme keeps it, in NumPy, from the checkpoint that a program is bound to.

Knows which arithmetic a scheme is, and no layout: what executors without packing of their own load
their weights by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.program.ops import Weight
from quire.quant.fp8 import Fp8Matrix, quantize_fp8
from quire.quant.int_weights import IntMatrix, coarse_rows, quantize_matrix
from quire.weights.binding import Binding

Float32s = NDArray[np.float32]


def read_f32(weight: Weight, binding: Binding) -> Float32s:
    """All rows in float32, [rows, columns] or [rows] of a vector."""
    return np.concatenate([binding.read_f32(part) for part in weight.parts]) + np.float32(
        weight.offset
    )


def in_few_bits(weight: Weight, binding: Binding) -> tuple[IntMatrix | Fp8Matrix, int]:
    """A weight with a scheme, and how many of its rows 8 bits are too coarse for."""
    scheme, values = weight.quantized, read_f32(weight, binding)
    assert scheme is not None, f"{weight.name} has no scheme"
    if scheme.is_float:
        return quantize_fp8(values, scheme), 0
    return quantize_matrix(values, scheme), coarse_rows(values) if scheme.bits == 8 else 0
