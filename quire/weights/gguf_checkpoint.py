"""A GGUF model as a Checkpoint, with the checkpoint's tensor names.

Plain types are returned as stored. Quantized tensors are converted to float32 on request, some rows
at a time, or as a whole and then cached until released. Rows that the converter reordered are put
back, as bytes, so that an f32, f16 or bf16 file yields exactly the tensors of its checkpoint.
`quantized` returns the blocks themselves, for executors that compute with them. Invariant:
unsupported tensors are rejected when the file is opened, by name and type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WeightsError
from quire.base.gguf_file import GgufArray, GgufTensor
from quire.base.gguf_model import GgufModel
from quire.base.show import show
from quire.weights.dtypes import from_bf16_bits
from quire.weights.gguf_blocks import UNPACKERS, QuantizedRows
from quire.weights.gguf_names import NAMES, ROPE_TENSORS, Order, Placed, place
from quire.weights.safetensors import StoredTensor, raise_problems

PLAIN: Mapping[str, str] = MappingProxyType({"F32": "f32", "F16": "f16", "BF16": "bf16"})
READABLE = (*PLAIN, *sorted(UNPACKERS))
WHOLE = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A tensor of the file, under the checkpoint's name."""

    stored: GgufTensor
    placed: Placed
    num_heads: int  # for Order.NEIGHBOURS

    @property
    def dtype(self) -> str:
        """Return the dtype in which the tensor is returned."""
        return PLAIN.get(self.stored.type.name, "f32")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the checkpoint's shape."""
        if self.placed.order is Order.TRANSPOSED:
            return tuple(reversed(self.stored.shape))
        return self.stored.shape


class GgufCheckpoint:
    """Tensors by the checkpoint's names. Raises WeightsError with all problems together."""

    described_by = "its metadata"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = GgufModel(path)
        self._held = _named(self._model)
        self._ready: dict[str, NDArray[np.uint8]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names, as in a checkpoint; an unknown name is kept from the file."""
        return tuple(self._held)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors in the file."""
        return sum(held.stored.end - held.stored.start for held in self._held.values())

    @property
    def files(self) -> dict[Path, os.stat_result]:
        """Return the model's files with their metadata when opened."""
        return {file.path: file.opened for file in self._model.files}

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a tensor as `tensor` returns it."""
        held = self._known(name)
        return held.dtype, held.shape

    def tensor(self, name: str) -> StoredTensor:
        """Return the tensor as in a checkpoint; a view of the file if nothing differs."""
        held = self._known(name)
        raw = self._ready.get(name)
        if raw is None:
            raw = self._made_ready(held)
            if held.placed.order is not Order.SAME or held.stored.type.name not in PLAIN:
                self._ready[name] = raw
        return StoredTensor(name=name, dtype=held.dtype, shape=held.shape, raw=raw)

    def content(self, name: str) -> StoredTensor:
        """Return what is digested: the tensor, or its blocks as stored."""
        held = self._known(name)
        kind = held.stored.type.name
        if kind in PLAIN:
            return self.tensor(name)
        raw = self._model.holder(held.stored.name).raw(held.stored)
        return StoredTensor(name=name, dtype=kind, shape=held.shape, raw=raw)

    def quantized_rows(self, name: str, *, transposed: bool) -> QuantizedRows | None:
        """Return the rows of a quantized matrix, or of stacked ones; see Checkpoint."""
        held = self._known(name)
        is_transposed = held.placed.order is Order.TRANSPOSED
        is_matrix = len(held.shape) > 1 and is_transposed == transposed
        return self.quantized(name) if is_matrix else None

    def fp8(self, name: str) -> None:
        """Return None: no block type is fp8."""

    def read_f32(self, name: str, rows: slice = WHOLE) -> NDArray[np.float32]:
        """Return a new float32 copy of the tensor, or of a slice of its first axis."""
        if (quantized := self.quantized_rows(name, transposed=False)) is not None:
            return quantized.to_f32(rows)
        stored = self.tensor(name)
        if stored.dtype == "bf16":
            return from_bf16_bits(stored.array[rows])
        return np.array(stored.array[rows], np.float32, order="C")

    def block_type(self, name: str) -> str:
        """Return the block type of a quantized tensor, "" for a plain one."""
        kind = self._known(name).stored.type.name
        return "" if kind in PLAIN else kind

    def quantized(self, name: str) -> QuantizedRows | None:
        """Return the blocks of a quantized tensor, None for a plain one.

        Rows are in the checkpoint's order; if the checkpoint stores the matrix transposed (GPT-2's
        products), they are still rows of the product, since blocks cannot be transposed.
        """
        held = self._known(name)
        if held.stored.type.name in PLAIN:
            return None
        return QuantizedRows(type=held.stored.type, blocks=self._blocks(held))

    def release(self, name: str) -> None:
        """Drop the cached tensor and its pages; views of the file stay valid."""
        self._ready.pop(name, None)
        stored = self._known(name).stored
        self._model.holder(stored.name).release(stored)

    def _known(self, name: str) -> _Held:
        held = self._held.get(name)
        if held is None:
            raise WeightsError(f"{self.path}: no tensor named {name!r}")
        return held

    def _made_ready(self, held: _Held) -> NDArray[np.uint8]:
        """Return the bytes of the tensor as `tensor` returns it."""
        kind, shape = held.stored.type, held.stored.shape
        if kind.name in PLAIN:
            raw = self._model.holder(held.stored.name).raw(held.stored)
            if held.placed.order is Order.SAME:
                return raw
            rows: NDArray[np.uint8] = raw.reshape(shape[0], -1)
            if held.placed.order is Order.NEIGHBOURS:
                return _halves_apart(rows, held.num_heads).reshape(-1)
            elements = rows.reshape(shape[0], -1, kind.block_bytes)
            return np.ascontiguousarray(elements.swapaxes(0, 1)).reshape(-1)
        values = QuantizedRows(type=kind, blocks=self._blocks(held)).to_f32()
        if held.placed.order is Order.TRANSPOSED:
            values = np.ascontiguousarray(values.T)
        return values.reshape(-1).view(np.uint8)

    def _blocks(self, held: _Held) -> NDArray[np.uint8]:
        """Return uint8 [rows, blocks per row, block bytes], with rows in the checkpoint's order."""
        kind, shape = held.stored.type, held.stored.shape
        raw = self._model.holder(held.stored.name).raw(held.stored)
        rows = raw.reshape(prod(shape[:-1]), -1, kind.block_bytes)
        if held.placed.order is not Order.NEIGHBOURS:
            return rows
        return _halves_apart(rows, held.num_heads).reshape(rows.shape)


def _halves_apart(rows: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Return the even rows of each head, then the odd ones: [heads, 2, rows per head / 2, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2))


def _named(model: GgufModel) -> dict[str, _Held]:
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in NAMES:
        raise WeightsError(
            f"{model.path}: general.architecture is {show(architecture)}; supported: "
            f"{', '.join(NAMES)}; use the safetensors checkpoint of the model"
        )
    problems: list[str] = []
    held: dict[str, _Held] = {}
    for name, stored in model.tensors.items():
        if name in ROPE_TENSORS:
            continue
        if stored.type.name not in READABLE:
            problems.append(
                f"{name} is {stored.type.name}, which is not supported; use a file with "
                f"{', '.join(READABLE)}"
            )
            continue
        placed, num_heads = place(name, NAMES[architecture]), 0
        if placed.order is Order.TRANSPOSED and len(stored.shape) != 2:
            problems.append(f"{name} has shape {list(stored.shape)}; a matrix is needed")
            continue
        if placed.order is Order.NEIGHBOURS:
            key = f"{architecture}.{placed.heads}"
            # Without its own count, keys have as many heads as queries.
            count = model.metadata.get(key, model.metadata.get(key.removesuffix("_kv")))
            num_heads = _number_of_heads(count)
            is_cut = len(stored.shape) == 1 and stored.type.name not in PLAIN
            if not num_heads or stored.shape[0] % (2 * num_heads) or is_cut:
                problems.append(
                    f"{name} is {stored.type.name} {list(stored.shape)}, and {key} is "
                    f"{show(count)}; an even number of rows per head is needed, and a plain type "
                    "for a vector"
                )
                continue
        if placed.source in held:
            problems.append(f"{name} and {held[placed.source].stored.name} are {placed.source}")
        held[placed.source] = _Held(stored=stored, placed=placed, num_heads=num_heads)
    raise_problems(f"{model.path}", problems)
    return held


def _number_of_heads(count: Any) -> int:
    """Return the number, 0 if it is invalid."""
    if isinstance(count, GgufArray):  # one number per layer, which must be equal
        values = set(count.numbers().tolist())
        count = values.pop() if len(values) == 1 else 0
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    return max(0, count) if is_whole else 0
