"""SafetensorsCheckpoint: the tensors of one or more safetensors files, as a `Checkpoint`.

Knows no shards' index; quire.weights.checkpoint finds the files and checks that each name is in one
of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.weights.dtypes import from_bf16_bits
from quire.weights.safetensors import SafetensorsFile, StoredTensor

WHOLE = slice(None)


class SafetensorsCheckpoint:
    """Tensors by name, in one or more safetensors files."""

    described_by = "config.json"

    def __init__(self, path: Path, holders: dict[str, SafetensorsFile]) -> None:
        self.path = path
        self._holders = holders

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names."""
        return tuple(self._holders)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(len(self.tensor(name).raw) for name in self._holders)

    @property
    def files(self) -> dict[Path, os.stat_result]:
        """Return the files with their metadata when opened."""
        return {file.path: file.opened for file in self._holders.values()}

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        stored = self.tensor(name)
        return stored.dtype, stored.shape

    def block_type(self, name: str) -> str:
        """Return "": Fp8Checkpoint wraps fp8 tensors, and config.json rejects other formats."""
        return ""

    def tensor(self, name: str) -> StoredTensor:
        """Return the stored tensor, a view of the file. Raises WeightsError for an unknown name."""
        holder = self._holders.get(name)
        if holder is None:
            raise WeightsError(f"{self.path}: no tensor named {name!r}")
        return holder.tensor(name)

    def content(self, name: str) -> StoredTensor:
        """Return the tensor itself."""
        return self.tensor(name)

    def quantized_rows(self, name: str, *, transposed: bool) -> None:
        """Return None: no tensor is quantized."""

    def fp8(self, name: str) -> None:
        """Return None: no tensor is in fp8."""

    def read_f32(self, name: str, rows: slice = WHOLE) -> NDArray[np.float32]:
        """Return a new float32 copy of the tensor, or of a slice of its first axis."""
        stored = self.tensor(name)
        part = stored.array[rows] if stored.shape else stored.array
        if stored.dtype == "bf16":
            return from_bf16_bits(part)
        return np.array(part, np.float32, order="C")

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; views stay valid and read the file again."""
        self._holders[name].release(name)
