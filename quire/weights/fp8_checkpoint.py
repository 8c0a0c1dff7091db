"""A safetensors checkpoint with fp8 (e4m3) matrices, as a `Checkpoint`.

`X.weight` in F8_E4M3 has scales in `X.weight_scale` (one number, or one per row) or
`X.weight_scale_inv` (one per block of 128 by 128; either name may hold any of these), by which its
values are multiplied: the format of Qwen, DeepSeek, AutoFP8 and compressed-tensors. `X.input_scale`
is a fixed scale of activations; config.json says whether it applies. Invariant: each fp8 tensor is
a matrix with scales of one of these shapes, and the digest includes the scales.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.quant.fp8 import OF_CODES
from quire.weights.dtypes import FP8, NUMPY_TYPES
from quire.weights.safetensors import StoredTensor, raise_problems
from quire.weights.safetensors_checkpoint import WHOLE, SafetensorsCheckpoint

Float32s = NDArray[np.float32]

BLOCK = 128
WEIGHT = ".weight"
SCALES = (".weight_scale", ".weight_scale_inv")
INPUT_SCALE = ".input_scale"
# Names of quire/quant/scheme.py.
BY_ROW, BY_BLOCK = "fp8", "fp8-block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Stored:
    """Rows of an fp8 matrix: codes uint8 [R, K] with the scales of the whole matrix.

    scales: [row blocks, column blocks], each for `block` rows and columns. first_row: the place of
    the rows in the matrix. scheme: the scheme that stores it without change, BY_ROW or BY_BLOCK.
    input_scale: of activations, None if not fixed.
    """

    codes: NDArray[np.uint8]
    scales: Float32s
    block: tuple[int, int]
    scheme: str
    input_scale: float | None = None
    first_row: int = 0

    @property
    def columns(self) -> int:
        """Return the number of elements in a row."""
        return int(self.codes.shape[1])

    def rows(self, first: int, count: int) -> Fp8Stored:
        """Return `count` rows from `first` on, still stored."""
        codes = self.codes[first : first + count]
        return replace(self, codes=codes, first_row=self.first_row + first)

    def scales_as_kept(self) -> Float32s:
        """Return scales as the scheme stores them: [R, 1], or [row blocks, column blocks].

        By block, the rows must begin with a block.
        """
        if self.scheme == BY_ROW:
            return self._of_rows(0, len(self.codes))
        assert self.first_row % BLOCK == 0, "rows begin inside a block"
        first = self.first_row // BLOCK
        return self.scales[first : first + -(-len(self.codes) // BLOCK)]

    def to_f32(self, rows: slice = WHOLE) -> Float32s:
        """Return the values of some rows, [rows, columns]. Thread-safe."""
        start, stop, _ = rows.indices(len(self.codes))
        by_column = self._of_rows(start, stop)[:, np.arange(self.columns) // self.block[1]]
        return np.multiply(OF_CODES[self.codes[start:stop]], by_column, dtype=np.float32)

    def _of_rows(self, start: int, stop: int) -> Float32s:
        """Return each row's scales."""
        numbers = np.arange(self.first_row + start, self.first_row + stop)
        found: Float32s = self.scales[numbers // self.block[0]]
        return found


class Fp8Checkpoint:
    """Tensors by name; scales of fp8 tensors are not listed, but belong to their tensor."""

    described_by = "config.json"

    def __init__(self, inner: SafetensorsCheckpoint) -> None:
        self.path: Path = inner.path
        self._inner = inner
        self._scales: dict[str, str] = {}  # name of the scales, by the weight's name
        self._input_scales: dict[str, float] = {}
        present = frozenset(inner.names)
        belonging: set[str] = set()
        problems: list[str] = []
        for name in inner.names:
            if inner.describe(name)[0] != FP8:
                continue
            base = name.removesuffix(WEIGHT)
            held = [base + ending for ending in SCALES if base + ending in present]
            fixed = base + INPUT_SCALE if base + INPUT_SCALE in present else ""
            problem = self._problem(name, held) or self._input_problem(fixed)
            if problem:
                problems.append(problem)
                continue
            self._scales[name] = held[0]
            if fixed:
                self._input_scales[name] = _number(inner, fixed)
            belonging |= {*held, base + INPUT_SCALE}
        raise_problems(f"{inner.path}: weights in fp8", problems)
        self._names = tuple(name for name in inner.names if name not in belonging)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names except those of scales."""
        return self._names

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return self._inner.total_bytes

    @property
    def files(self) -> Mapping[Path, os.stat_result]:
        """Return the files with their metadata when opened."""
        return self._inner.files

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape; fp8 is returned as f32."""
        dtype, shape = self._inner.describe(name)
        return ("f32" if name in self._scales else dtype), shape

    def block_type(self, name: str) -> str:
        """Return "fp8" or "fp8-block", "" for a plain tensor."""
        stored = self.fp8(name)
        return "" if stored is None else stored.scheme

    def tensor(self, name: str) -> StoredTensor:
        """Return the tensor as stored, or dequantized."""
        stored = self.fp8(name)
        if stored is None:
            return self._inner.tensor(name)
        values = stored.to_f32()
        raw = values.reshape(-1).view(np.uint8)
        return StoredTensor(name=name, dtype="f32", shape=values.shape, raw=raw)

    def content(self, name: str) -> StoredTensor:
        """Return the tensor as stored; the dtype of fp8 includes the digest of its scales."""
        stored = self._inner.tensor(name)
        if name not in self._scales:
            return stored
        scales = self._inner.tensor(self._scales[name])
        kind = f"{scales.dtype} {list(scales.shape)}"
        fixed = self._input_scales.get(name)
        both = scales.raw.tobytes() + (b"" if fixed is None else fixed.hex().encode())
        digest = hashlib.blake2b(both, digest_size=16).hexdigest()
        return replace(stored, dtype=f"{FP8} by {kind} {digest}")

    def quantized_rows(self, name: str, *, transposed: bool) -> Fp8Stored | None:
        """Return the rows of an fp8 matrix; see Checkpoint."""
        return None if transposed else self.fp8(name)

    def fp8(self, name: str) -> Fp8Stored | None:
        """Return the codes and scales of an fp8 matrix, None for any other tensor."""
        if name not in self._scales:
            return None
        stored = self._inner.tensor(name)
        scales = self._inner.read_f32(self._scales[name])
        shared = _shared(stored.shape, scales.shape)
        assert shared is not None, "checked when it was opened"
        scheme, block = shared
        return Fp8Stored(
            codes=stored.raw.reshape(stored.shape),
            scales=scales.reshape(-1, -(-stored.shape[1] // block[1])),
            block=block,
            scheme=scheme,
            input_scale=self._input_scales.get(name),
        )

    def read_f32(self, name: str, rows: slice = WHOLE) -> Float32s:
        """Return a new float32 copy of the tensor, or of a slice of its first axis."""
        stored = self.fp8(name)
        return self._inner.read_f32(name, rows) if stored is None else stored.to_f32(rows)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; views stay valid and read the file again."""
        self._inner.release(name)

    def _input_problem(self, name: str) -> str:
        """Return what is wrong with a fixed scale of activations, "" if nothing or no name."""
        if not name:
            return ""
        dtype, shape = self._inner.describe(name)
        if dtype not in NUMPY_TYPES or any(size != 1 for size in shape):
            return f"{name} is {dtype} {list(shape)}; one number for all activations is expected"
        scale = _number(self._inner, name)
        if not 0 < scale < math.inf:
            return f"{name} is {scale:g}; a scale of activations is finite and above 0"
        return ""

    def _problem(self, name: str, held: list[str]) -> str:
        """Return what is wrong with an fp8 tensor and its scales, "" if nothing."""
        _, shape = self._inner.describe(name)
        if not name.endswith(WEIGHT) or len(shape) != 2:
            return f"{name} is fp8 {list(shape)}; only matrices X{WEIGHT} with scales are supported"
        if len(held) != 1:
            base = name.removesuffix(WEIGHT)
            return f"{name} needs {' or '.join(base + ending for ending in SCALES)}; it has " + (
                "both" if held else "neither"
            )
        dtype, scales = self._inner.describe(held[0])
        if dtype not in NUMPY_TYPES or _shared(shape, scales) is None:
            blocks = [-(-size // BLOCK) for size in shape]
            return (
                f"{held[0]} is {dtype} {list(scales)}; for {name} {list(shape)} one number, "
                f"[{shape[0]}, 1] by row or {blocks} by blocks of {BLOCK} x {BLOCK} is allowed"
            )
        return ""


def _number(checkpoint: SafetensorsCheckpoint, name: str) -> float:
    return float(checkpoint.read_f32(name).item())


def _shared(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[str, tuple[int, int]] | None:
    """Return the scheme, and the rows and columns that share a scale; None for invalid shapes."""
    rows, columns = shape
    if not rows or not columns:
        return None
    if scales == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return BY_BLOCK, (BLOCK, BLOCK)
    if all(size == 1 for size in scales):
        return BY_ROW, (rows, columns)
    if scales in ((rows,), (rows, 1)):
        return BY_ROW, (1, columns)
    return None
