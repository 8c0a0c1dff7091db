"""How int4 weights lie on a device, so that a program reads what it needs in one run of bytes.

A weight [N, K] is cut into panels of 64 outputs and blocks of 128 columns. The block of a panel is
4096 bytes in a row: for each output 64 bytes, each of two integers plus their zero point (0 to 15).
Columns share a byte with those HALF further: 64, or 32 in schemes with groups of 32, so that the
low nibbles of HALF bytes, and the high ones, are HALF columns that follow each other, of one group.

    byte (output o, block b, j):   low: column 128 b + 2 HALF (j // HALF) + j % HALF;  high: + HALF

Made once, while loading, in NumPy. Always holds: what lies past N or K has the value 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import ACTIVATION_GROUP

PANEL = 64  # outputs
BLOCK = ACTIVATION_GROUP  # columns
BLOCK_BYTES = BLOCK // 2  # of an output


def half_of(group: int) -> int:
    """Return columns from one nibble of a byte to the other."""
    return min(group, BLOCK // 2)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """packed: uint8 [panels, blocks, 64, 64]. scales: bf16 or f32 [groups, N] (bf16 where it holds
    them all); zeros: uint8 [groups, N], None where all zero points are 8. group: 32, 64 or 128.
    columns: K."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    columns: int

    @classmethod
    def of(cls, matrix: IntMatrix, device: torch.device | str) -> Int4Weight:
        """Return an integer weight (quire.quant.int_weights) on a device."""
        scheme = matrix.scheme
        if scheme.bits != 4:
            raise ValueError(f"a weight of {scheme.name}; one of 4 bits is needed")
        groups = scheme.num_groups(matrix.values.shape[1])
        scales = torch.from_numpy(np.ascontiguousarray(matrix.scales[:, :groups].T))
        narrow = scales.to(torch.bfloat16)
        held = ((narrow.float() == scales) | scales.isnan()).all()
        zeros = np.ascontiguousarray(matrix.zeros[:, :groups].T.astype(np.uint8))
        return cls(
            packed=torch.from_numpy(pack(matrix)).to(device),
            scales=(narrow if held else scales).to(device),
            zeros=torch.from_numpy(zeros).to(device) if scheme.has_zero_points else None,
            group=scheme.group,
            columns=matrix.values.shape[1],
        )

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.scales.shape[1])


def pack(matrix: IntMatrix) -> NDArray[np.uint8]:
    """Return the integers of a matrix as [panels, blocks, 64, 64] bytes."""
    outputs, columns = matrix.values.shape
    group, half = matrix.scheme.group, half_of(matrix.scheme.group)
    panels, blocks = -(-outputs // PANEL), -(-columns // BLOCK)
    zeros = np.repeat(matrix.zeros, group, axis=1)[:, :columns]
    # Past the end: the zero point itself, which is 0 once it is taken off.
    last = ((0, panels * PANEL - outputs), (0, blocks * BLOCK - columns))
    shifted = np.pad(zeros, last, mode="edge")
    shifted[:outputs, :columns] += matrix.values
    pairs = shifted.astype(np.uint8).reshape(panels, PANEL, blocks, BLOCK // (2 * half), 2, half)
    bytes_ = pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4
    return np.ascontiguousarray(
        bytes_.reshape(panels, PANEL, blocks, BLOCK_BYTES).transpose(0, 2, 1, 3)
    )
