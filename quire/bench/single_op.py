"""Programs of a single operation, cut out of a model's program, for `quire bench kernels`.

The trunk produces the operation's inputs (rows of random tables; keys and values, which it stores).
The head is the operation, repeated where its weights or keys must come from memory and not from
caches. Weights repeat one random block of rows, so that the NumPy twin computes only one. Reads no
clock; any executor can run these programs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.execute.executor import Executor
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.declarations import Weight, WeightForm, WeightPart
from quire.program.forms import IdSource
from quire.program.ops import Attention, Copy, Embed, Linear, Op, StoreKV
from quire.program.program import Program
from quire.program.tensors import Buffer, DType, Rows, View
from quire.weights.safetensors import StoredTensor
from quire.weights.safetensors_checkpoint import WHOLE

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

TABLE_ROWS = 251  # a prime: what repeats lies at no kernel's step
PIECE_ROWS = 1024
BLOCK_SIZE = 16
_FILL_TOKENS = 512


class SingleOp:
    """`op` of `program` alone in a program, `copies` times, each with its own weights or layer.

    one_piece: limit a product's outputs to one piece of weights.
    """

    def __init__(
        self, program: Program, op: Op, *, copies: int = 1, one_piece: bool = False
    ) -> None:
        self._buffers: list[Buffer] = []
        self._weights: dict[str, Weight] = {}
        self._trunk: list[Op] = []
        self._tables = 0
        limit = PIECE_ROWS if one_piece else 0
        inputs = {view: self._input(view) for view in dict.fromkeys(op.inputs)}
        outputs = {
            view: inputs.get(view) or self._output(program, op, view, limit) for view in op.outputs
        }
        caches = tuple(replace(cache, layers=copies) for cache in program.caches)
        if isinstance(op, Attention):
            width = caches[0].kv_heads * caches[0].head_dim
            kept = Buffer(0, "", Rows.TOKENS, width, caches[0].dtype)
            keys, values = (self._input(View(kept, 0, width)) for _ in range(2))
            self._trunk += [StoreKV(k=keys, v=values, layer=layer) for layer in range(copies)]
        moved = op.with_views(lambda view: inputs.get(view) or outputs[view])
        self.ops = tuple(self._copy_of(program, moved, copy, limit) for copy in range(copies))
        self.program = Program(
            name=op.kind,
            buffers=tuple(self._buffers),
            segments={"trunk": tuple(self._trunk), "head": self.ops},
            weights=self._weights,
            caches=caches,
            ropes=program.ropes,
            outputs={"hidden": moved.inputs[0], "logits": moved.outputs[0]},
            vocab_size=TABLE_ROWS,
            max_positions=program.max_positions,
        )

    def _input(self, view: View) -> View:
        """Add rows of a separate table, by token id, in the view's dtype."""
        name = f"table.{self._tables}"
        self._tables += 1
        part = WeightPart("rows", f"made.{name}", TABLE_ROWS)
        self._weights[name] = Weight(name, WeightForm.TABLE, (part,), view.width, DType.F32)
        rows = self._new(view.width, DType.F32)
        self._trunk.append(Embed(y=rows, weight=name, ids=IdSource.TOKENS))
        if view.dtype is DType.F32:
            return rows
        rounded = self._new(view.width, view.dtype)
        self._trunk.append(Copy(x=rows, y=rounded))
        return rounded

    def _output(self, program: Program, op: Op, view: View, limit: int) -> View:
        width = view.width
        if isinstance(op, Linear) and limit:
            width = min(program.weights[op.weight].rows, limit)
        return self._new(width, view.dtype)

    def _new(self, width: int, dtype: DType) -> View:
        index = len(self._buffers)
        buffer = Buffer(index, f"buffer.{index}", Rows.TOKENS, width, dtype)
        self._buffers.append(buffer)
        return View(buffer, 0, width)

    def _copy_of(self, program: Program, op: Op, copy: int, limit: int) -> Op:
        """Return the operation with weights, or a layer of the cache, of its own."""
        changes: dict[str, Any] = {"layer": copy} if isinstance(op, Attention) else {}
        for key in ("weight", "bias"):
            if (name := op.parameters.get(key)) is not None:
                changes[key] = f"{key}.{copy}"
                self._weights[f"{key}.{copy}"] = _of_pieces(program.weights[name], key, copy, limit)
        return replace(op, **changes)


def _of_pieces(weight: Weight, key: str, copy: int, limit: int) -> Weight:
    """Return the weight, made of one repeated piece."""
    rows = min(weight.rows, limit or weight.rows)
    piece = min(rows, PIECE_ROWS)
    parts = tuple(
        WeightPart(str(first), f"made.{key}", min(piece, rows - first), 0, piece)
        for first in range(0, rows, piece)
    )
    return replace(weight, name=f"{key}.{copy}", parts=parts, offset=0.0)


class RandomTensors:
    """The Checkpoint of such a program: random tensors, equal for equal names and shapes.

    Tensors are drawn on first use and scaled so that products keep the size of their inputs.
    """

    described_by = "the operation"
    path = Path("made up")
    files: Mapping[Path, os.stat_result] = MappingProxyType({})

    def __init__(self, program: Program) -> None:
        self._shapes = program.source_shapes()
        self._drawn: dict[str, Float32s] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names."""
        return tuple(self._shapes)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(4 * int(np.prod(shape)) for shape in self._shapes.values())

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape."""
        return "f32", self._shapes[name]

    def block_type(self, name: str) -> str:
        """Return None: no tensor is quantized."""
        return ""

    def tensor(self, name: str) -> StoredTensor:
        values = self._values(name)
        raw = values.reshape(-1).view(np.uint8)
        return StoredTensor(name=name, dtype="f32", shape=values.shape, raw=raw)

    def content(self, name: str) -> StoredTensor:
        """Return the tensor itself."""
        return self.tensor(name)

    def quantized_rows(self, name: str, *, transposed: bool) -> None:
        """Return None: no tensor is quantized."""

    def fp8(self, name: str) -> None:
        """Return None: no tensor is in fp8."""

    def read_f32(self, name: str, rows: slice = WHOLE) -> Float32s:
        """Return a copy of the tensor, or of some rows."""
        return self._values(name)[rows].copy()

    def release(self, name: str) -> None:
        """Do nothing; there is no file to read it from again."""

    def _values(self, name: str) -> Float32s:
        if name not in self._drawn:
            shape = self._shapes[name]
            rng = np.random.default_rng(list(name.encode()))
            values = rng.standard_normal(shape, np.float32)
            if name == "made.weight" and len(shape) == 2:
                values *= np.float32(shape[1] ** -0.5)
            self._drawn[name] = values
        return self._drawn[name]


def rows_batch(token_ids: Int32s, rope_positions: Int32s) -> ForwardBatch:
    """Return a batch of rows without a KV cache, each its own sequence."""
    count = len(token_ids)
    return ForwardBatch(
        token_ids=token_ids,
        positions=np.zeros(count, np.int32),
        rope_positions=rope_positions,
        caches=(
            CacheRows(
                kv_slots=np.full(count, -1, np.int32), block_tables=np.zeros((count, 1), np.int32)
            ),
        ),
        seq_starts=np.arange(count + 1, dtype=np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
    )


class Sequences:
    """Sequences of random tokens in a KV cache, with consecutive blocks."""

    def __init__(self, token_ids: Int32s) -> None:
        self.token_ids = token_ids  # [S, positions]
        sequences, positions = token_ids.shape
        self._columns = -(-positions // BLOCK_SIZE)
        self.num_blocks = sequences * self._columns

    def store(self, executor: Executor) -> None:
        """Return the batch that stores keys and values of all tokens."""
        sequences, positions = self.token_ids.shape
        for sequence in range(sequences):
            for first in range(0, positions, _FILL_TOKENS):
                count = min(_FILL_TOKENS, positions - first)
                executor.run_trunk(self.batch([sequence], first, count, stored=True))

    def batch(
        self, sequences: Sequence[int], first: int, count: int, *, stored: bool = False
    ) -> ForwardBatch:
        """Return the batch of positions first .. first + count - 1 of each of these sequences."""
        at = np.arange(first, first + count, dtype=np.int32)
        rows = len(sequences) * count
        tables = np.array(
            [np.arange(self._columns) + sequence * self._columns for sequence in sequences],
            np.int32,
        )
        slots = tables[:, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
        positions = np.tile(at, len(sequences))
        return ForwardBatch(
            token_ids=self.token_ids[list(sequences), first : first + count].reshape(-1),
            positions=positions,
            rope_positions=positions,
            caches=(
                CacheRows(
                    kv_slots=slots.reshape(-1) if stored else np.full(rows, -1, np.int32),
                    block_tables=tables,
                ),
            ),
            seq_starts=np.arange(0, rows + 1, count, dtype=np.int32),
            sample_rows=np.arange(rows, dtype=np.int32),
        )
