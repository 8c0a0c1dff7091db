"""ChosenTensors: some tensors of one or more checkpoints under other names, as a `Checkpoint`.

For programs that are bound to a part of a file, such as one head of several, or to tensors of two
models. Reads nothing by itself. Always holds: each name stands for one tensor of one checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.weights.checkpoint import Checkpoint, RowReader
from quire.weights.fp8_checkpoint import Fp8Stored
from quire.weights.safetensors import StoredTensor
from quire.weights.safetensors_checkpoint import WHOLE

# By name: the checkpoint that holds the tensor, and its name there.
Sources = Mapping[str, tuple[Checkpoint, str]]


class ChosenTensors:
    """The tensors of `sources`. path: what errors name."""

    described_by = "config.json"

    def __init__(self, path: Path, sources: Sources) -> None:
        self.path = path
        self._sources = dict(sources)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names they are known under here."""
        return tuple(self._sources)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of these tensors."""
        return sum(len(self.content(name).raw) for name in self._sources)

    @property
    def files(self) -> Mapping[Path, os.stat_result]:
        """Return the files of all checkpoints that they come from."""
        files: dict[Path, os.stat_result] = {}
        for checkpoint, _ in self._sources.values():
            files |= checkpoint.files
        return files

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        checkpoint, stored = self._source(name)
        return checkpoint.describe(stored)

    def block_type(self, name: str) -> str:
        """Return the block type of a quantized tensor, "" for a plain one."""
        checkpoint, stored = self._source(name)
        return checkpoint.block_type(stored)

    def tensor(self, name: str) -> StoredTensor:
        """Return the tensor. Raises WeightsError for an unknown name."""
        checkpoint, stored = self._source(name)
        return checkpoint.tensor(stored)

    def content(self, name: str) -> StoredTensor:
        """Return what is digested."""
        checkpoint, stored = self._source(name)
        return checkpoint.content(stored)

    def quantized_rows(self, name: str, *, transposed: bool) -> RowReader | None:
        """See Checkpoint."""
        checkpoint, stored = self._source(name)
        return checkpoint.quantized_rows(stored, transposed=transposed)

    def fp8(self, name: str) -> Fp8Stored | None:
        """See Checkpoint."""
        checkpoint, stored = self._source(name)
        return checkpoint.fp8(stored)

    def read_f32(self, name: str, rows: slice = WHOLE) -> NDArray[np.float32]:
        """Return a new float32 copy of the tensor, or of a slice of its first axis."""
        checkpoint, stored = self._source(name)
        return checkpoint.read_f32(stored, rows)

    def release(self, name: str) -> None:
        """See Checkpoint."""
        checkpoint, stored = self._source(name)
        checkpoint.release(stored)

    def _source(self, name: str) -> tuple[Checkpoint, str]:
        if name not in self._sources:
            raise WeightsError(f"{self.path}: no tensor named {name!r}")
        return self._sources[name]
