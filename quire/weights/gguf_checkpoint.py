"""GgufCheckpoint: a GGUF model with the face of Checkpoint, under the checkpoint's names.

Plain types are handed out as they lie in the file. Quantized ones become float32 when they are
asked for, some rows at a time, or as a whole and then kept until they are released; rows that the
converter reordered are put back, as bytes, so that an f32, f16 or bf16 file gives the very tensors
of its checkpoint. `quantized` hands out the blocks themselves, for who computes with them. Always
holds: what cannot be read is refused when the file is opened, by name and type.
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
    """A tensor of the file under the checkpoint's name."""

    stored: GgufTensor
    placed: Placed
    num_heads: int  # of Order.NEIGHBOURS

    @property
    def dtype(self) -> str:
        """What it is handed out as."""
        return PLAIN.get(self.stored.type.name, "f32")

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint's shape."""
        if self.placed.order is Order.TRANSPOSED:
            return tuple(reversed(self.stored.shape))
        return self.stored.shape


class GgufCheckpoint:
    """Tensors by the checkpoint's names. Raises WeightsError, all problems listed together."""

    described_by = "its metadata"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = GgufModel(path)
        self._held = _named(self._model)
        self._ready: dict[str, NDArray[np.uint8]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, as a checkpoint has them; a name nobody knows stays the file's."""
        return tuple(self._held)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(held.stored.end - held.stored.start for held in self._held.values())

    @property
    def files(self) -> dict[Path, os.stat_result]:
        """The model's files, and what the system knew of them when they were opened."""
        return {file.path: file.opened for file in self._model.files}

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of the tensor `name` as it is handed out."""
        held = self._known(name)
        return held.dtype, held.shape

    def tensor(self, name: str) -> StoredTensor:
        """The tensor as a checkpoint would have it; a view of the file where nothing differs."""
        held = self._known(name)
        raw = self._ready.get(name)
        if raw is None:
            raw = self._made_ready(held)
            if held.placed.order is not Order.SAME or held.stored.type.name not in PLAIN:
                self._ready[name] = raw
        return StoredTensor(name=name, dtype=held.dtype, shape=held.shape, raw=raw)

    def content(self, name: str) -> StoredTensor:
        """What is digested of it: the tensor, or the blocks as they lie in the file."""
        held = self._known(name)
        kind = held.stored.type.name
        if kind in PLAIN:
            return self.tensor(name)
        raw = self._model.holder(held.stored.name).raw(held.stored)
        return StoredTensor(name=name, dtype=kind, shape=held.shape, raw=raw)

    def quantized_rows(self, name: str, *, transposed: bool) -> QuantizedRows | None:
        """The rows of a quantized matrix; see Checkpoint."""
        held = self._known(name)
        is_turned = held.placed.order is Order.TRANSPOSED
        return self.quantized(name) if len(held.shape) == 2 and is_turned == transposed else None

    def fp8(self, name: str) -> None:
        """No type of blocks is fp8."""

    def read_f32(self, name: str, rows: slice = WHOLE) -> NDArray[np.float32]:
        """A fresh float32 copy of the tensor, or of a slice of its first axis."""
        if (quantized := self.quantized_rows(name, transposed=False)) is not None:
            return quantized.to_f32(rows)
        stored = self.tensor(name)
        if stored.dtype == "bf16":
            return from_bf16_bits(stored.array[rows])
        return np.array(stored.array[rows], np.float32, order="C")

    def block_type(self, name: str) -> str:
        """The type of a quantized tensor's blocks, "" of a plain one."""
        kind = self._known(name).stored.type.name
        return "" if kind in PLAIN else kind

    def quantized(self, name: str) -> QuantizedRows | None:
        """The blocks of a quantized tensor, None of a plain one.

        Rows come in the checkpoint's order; where it stores a matrix the other way round
        (GPT-2's products) they are rows of the product still: blocks cannot be transposed.
        """
        held = self._known(name)
        if held.stored.type.name in PLAIN:
            return None
        return QuantizedRows(type=held.stored.type, blocks=self._blocks(held))

    def release(self, name: str) -> None:
        """Drop what was made of the tensor, and its pages; views of the file stay valid."""
        self._ready.pop(name, None)
        stored = self._known(name).stored
        self._model.holder(stored.name).release(stored)

    def _known(self, name: str) -> _Held:
        held = self._held.get(name)
        if held is None:
            raise WeightsError(f"{self.path}: no tensor named {name!r}")
        return held

    def _made_ready(self, held: _Held) -> NDArray[np.uint8]:
        """The bytes of the tensor as it is handed out."""
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
        """uint8 [rows, blocks a row, block bytes], rows in the checkpoint's order."""
        kind, shape = held.stored.type, held.stored.shape
        raw = self._model.holder(held.stored.name).raw(held.stored)
        rows = raw.reshape(prod(shape[:-1]), -1, kind.block_bytes)
        if held.placed.order is not Order.NEIGHBOURS:
            return rows
        return _halves_apart(rows, held.num_heads).reshape(rows.shape)


def _halves_apart(rows: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Of each head the even rows, then the odd ones: [heads, 2, rows a head / 2, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2))


def _named(model: GgufModel) -> dict[str, _Held]:
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in NAMES:
        raise WeightsError(
            f"{model.path}: general.architecture is {show(architecture)}; {', '.join(NAMES)} can "
            "be read; take the safetensors checkpoint of the model"
        )
    problems: list[str] = []
    held: dict[str, _Held] = {}
    for name, stored in model.tensors.items():
        if name in ROPE_TENSORS:
            continue
        if stored.type.name not in READABLE:
            problems.append(
                f"{name} is {stored.type.name}, which is not read yet; {', '.join(READABLE)} are: "
                "take a file of one of these"
            )
            continue
        placed, num_heads = place(name, NAMES[architecture]), 0
        if placed.order is Order.TRANSPOSED and len(stored.shape) != 2:
            problems.append(f"{name} has shape {list(stored.shape)}; a matrix is needed")
            continue
        if placed.order is Order.NEIGHBOURS:
            key = f"{architecture}.{placed.heads}"
            # One number a model, or none: then keys have as many heads as queries.
            count = model.metadata.get(key, model.metadata.get(key.removesuffix("_kv")))
            num_heads = _number_of_heads(count)
            is_cut = len(stored.shape) == 1 and stored.type.name not in PLAIN
            if not num_heads or stored.shape[0] % (2 * num_heads) or is_cut:
                problems.append(
                    f"{name} is {stored.type.name} {list(stored.shape)}, and {key} is "
                    f"{show(count)}; an even number of rows a head is needed, of plain numbers "
                    "where it is a vector"
                )
                continue
        if placed.source in held:
            problems.append(f"{name} and {held[placed.source].stored.name} are {placed.source}")
        held[placed.source] = _Held(stored=stored, placed=placed, num_heads=num_heads)
    raise_problems(f"{model.path}", problems)
    return held


def _number_of_heads(count: Any) -> int:
    """The number, 0 where it is none."""
    if isinstance(count, GgufArray):  # a number for each layer, which must be the same
        values = set(count.numbers().tolist())
        count = values.pop() if len(values) == 1 else 0
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    return max(0, count) if is_whole else 0
