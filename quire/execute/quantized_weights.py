"""A weight as its scheme keeps it, in NumPy, from the checkpoint that a program is bound to.

Knows which arithmetic a scheme is, and no layout: what executors without packing of their own load
their weights by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.program.declarations import Weight
from quire.quant.fp8 import OF_CODES, Fp8Matrix, quantize_fp8
from quire.quant.int_weights import IntMatrix, coarse_rows, quantize_matrix
from quire.weights.binding import Binding
from quire.weights.fp8_checkpoint import Fp8Stored

Float32s = NDArray[np.float32]


def read_f32(weight: Weight, binding: Binding) -> Float32s:
    """Return all rows in float32, [rows, columns] or [rows] of a vector."""
    parts = []
    for part in weight.parts:
        values = binding.read_f32(part)
        if part.of_columns:  # row-parallel: some columns
            values = values[:, part.first_column : part.first_column + weight.columns]
        parts.append(values)
    return np.concatenate(parts) + np.float32(weight.offset)


def quantize_weight(weight: Weight, binding: Binding) -> tuple[IntMatrix | Fp8Matrix, int]:
    """Return a weight with a scheme, and how many of its rows 8 bits are too coarse for."""
    scheme = weight.quantized
    assert scheme is not None, f"{weight.name} has no scheme"
    if (stored := stored_fp8(weight, binding)) is not None:
        values = OF_CODES[np.concatenate([part.codes for part in stored])]
        fixed = fixed_input_scale(weight, stored)
        kept = stored_scales(stored)
        return Fp8Matrix(scheme=scheme, values=values, scales=kept, input_scale=fixed), 0
    assert not scheme.is_static, f"{weight.name} is not in fp8; nothing fixes its scale"
    values = read_f32(weight, binding)
    if scheme.is_float:
        return quantize_fp8(values, scheme), 0
    return quantize_matrix(values, scheme), coarse_rows(values) if scheme.bits == 8 else 0


def stored_fp8(weight: Weight, binding: Binding) -> list[Fp8Stored] | None:
    """Return the weight's parts where its scheme is fp8 and the checkpoint has all of them in
    it."""
    if weight.quantized is None or not weight.quantized.is_float or weight.offset:
        return None
    parts = [stored for part in weight.parts if (stored := binding.fp8(part)) is not None]
    return parts if len(parts) == len(weight.parts) else None


def stored_scales(parts: list[Fp8Stored]) -> Float32s:
    """Their scales as Fp8Matrix has them."""
    return np.concatenate([part.scales_as_kept() for part in parts])


def fixed_input_scale(weight: Weight, parts: list[Fp8Stored]) -> np.float32 | None:
    """Return what rows are divided by before they become fp8, None where they have scales of their
    own.

    Parts of one weight take the same rows, so the largest of their scales: none is cut off.
    """
    if weight.quantized is None or not weight.quantized.is_static:
        return None
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    assert len(scales) == len(parts), f"{weight.name}: looked at when its scheme was chosen"
    return np.float32(max(scales))
