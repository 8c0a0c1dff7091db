"""Bind a program's parameter table to a checkpoint; report all mismatches together.

A missing tensor, an unexpected tensor and a wrong shape are errors. Accepted beyond the table:
buffers in old checkpoints that can be computed (BUFFERS); a copy of the embedding as
`lm_head.weight` if the head is tied, if its bytes are equal; rows of a source that no part uses. A
program gives the full names of its sources (`transformer.h.0...`); if no name in the checkpoint has
the most common first component, the file was saved from the decoder alone, and its names lack that
component (`h.0...`). Reads no values except those of the two tied matrices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.program.declarations import WeightPart
from quire.program.ops import Embed, Linear
from quire.program.program import Program
from quire.weights.checkpoint import Checkpoint, RowReader
from quire.weights.dtypes import NUMPY_TYPES
from quire.weights.safetensors import StoredTensor, raise_problems

if TYPE_CHECKING:
    from quire.weights.fp8_checkpoint import Fp8Stored

TIED_COPY = "lm_head.weight"
COMPARED_ROWS = 4_096
# Rotary frequencies; GPT-2's causal mask and its mask value.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


# Elements of a quantized tensor converted to float32 at once: few, to fit in the CPU's caches.
PIECE_ELEMENTS = 1 << 19
PIECE_ROWS = 32  # pieces are multiples of the rows of a kernel's panel


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of a weight: `rows` rows from `first_row` on of a tensor with the bytes `raw`.

    The tensor is [of_rows, columns], or [columns, of_rows] if transposed. is_content: whether the
    bytes are those that are digested.
    """

    raw: NDArray[np.uint8]
    dtype: str
    rows: int
    first_row: int
    of_rows: int
    transposed: bool
    is_content: bool


class Binding:
    """A checkpoint that matches a program, accessed by the parts of its weights."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self.checkpoint = checkpoint
        self._names = names  # names in the checkpoint, by names in the program

    def stored_name(self, part: WeightPart) -> str:
        """Return the checkpoint's name of the tensor of which `part` is a slice."""
        return self._names[part.source]

    def tensor(self, part: WeightPart) -> StoredTensor:
        """Return the whole stored tensor of which `part` is a slice."""
        return self.checkpoint.tensor(self._names[part.source])

    def content(self, part: WeightPart) -> StoredTensor:
        """Return the digested content of the tensor of which `part` is a slice."""
        return self.content_of(part.source)

    def content_of(self, source: str) -> StoredTensor:
        """Return the digested content of a tensor by its name in the program."""
        return self.checkpoint.content(self._names[source])

    def pieces(self, part: WeightPart) -> Iterator[Callable[[], Piece]]:
        """Yield the part's rows in order, as functions that produce each piece in any thread.

        A piece is the stored tensor, or for a quantized tensor some rows at a time as float32.
        """
        name = self._names[part.source]
        rows = self.checkpoint.quantized_rows(name, transposed=part.transposed)
        if rows is None:
            yield partial(self._whole, part)
            return
        step = PIECE_ELEMENTS // max(1, rows.columns) // PIECE_ROWS * PIECE_ROWS or PIECE_ROWS
        for first in range(0, part.rows, step):
            yield partial(_some, rows, part.first_row + first, min(step, part.rows - first))

    def _whole(self, part: WeightPart) -> Piece:
        stored = self.tensor(part)
        return Piece(
            raw=stored.raw,
            dtype=stored.dtype,
            rows=part.rows,
            first_row=part.first_row,
            of_rows=part.of_rows,
            transposed=part.transposed,
            is_content=not self.checkpoint.block_type(self._names[part.source]),
        )

    def read_f32(self, part: WeightPart) -> NDArray[np.float32]:
        """Return a new float32 copy of the part's rows, with all columns; [rows] for a vector."""
        name, rows = self._names[part.source], slice(part.first_row, part.first_row + part.rows)
        if part.transposed:
            return np.ascontiguousarray(self.checkpoint.read_f32(name)[:, rows].T)
        if part.stacked and self.checkpoint.quantized_rows(name, transposed=False) is None:
            # Rows are counted through all experts; the tensor's first axis is the experts'.
            expert, first = divmod(part.first_row, part.of_rows // part.stacked)
            matrix = self.checkpoint.read_f32(name, slice(expert, expert + 1))[0]
            return np.ascontiguousarray(matrix[first : first + part.rows])
        return self.checkpoint.read_f32(name, rows)

    def fp8(self, part: WeightPart) -> Fp8Stored | None:
        """Return the part's rows if its tensor is stored in fp8."""
        stored = None if part.transposed else self.checkpoint.fp8(self._names[part.source])
        return None if stored is None else stored.rows(part.first_row, part.rows)

    def release(self, part: WeightPart) -> None:
        """Drop the pages of the tensor of which `part` is a slice."""
        self.release_source(part.source)

    def release_source(self, source: str) -> None:
        """Drop the pages of a tensor by its name in the program."""
        self.checkpoint.release(self._names[source])


def own_columns(piece: Piece, part: WeightPart, columns: int) -> Piece:
    """Return the piece with the part's columns only, which are `columns`."""
    if not part.of_columns:
        return piece
    raw, end = piece.raw.view(np.uint8), part.first_column + columns
    if piece.transposed:
        own = raw.reshape(part.of_columns, -1)[part.first_column : end]
        return replace(piece, raw=np.ascontiguousarray(own).reshape(-1), is_content=False)
    size = NUMPY_TYPES[piece.dtype].itemsize
    rows = raw.reshape(-1, part.of_columns * size)[piece.first_row : piece.first_row + piece.rows]
    own = np.ascontiguousarray(rows[:, part.first_column * size : end * size])
    return replace(piece, raw=own.reshape(-1), first_row=0, of_rows=piece.rows, is_content=False)


def _some(rows: RowReader, first: int, count: int) -> Piece:
    values = rows.to_f32(slice(first, first + count))
    raw = values.reshape(-1).view(np.uint8)
    return Piece(
        raw=raw,
        dtype="f32",
        rows=count,
        first_row=0,
        of_rows=count,
        transposed=False,
        is_content=False,
    )


# Weights that only layers have which predict further tokens (multi-token prediction): of what joins
# a hidden state and an embedding. They follow the model's layers, as in DeepSeek-V3, or have a name
# of their own, as in Qwen3-Next (mtp.layers.0) and MiMo (model.mtp_layers.0).
MTP_PARTS = (".eh_proj.weight", ".enorm.weight")
_MTP_NAME = re.compile(r"(?:model\.)?mtp(?:_\w+)?\.")
# The number of a layer in a weight's name, as in model.layers.3.mlp, h.3.attn or blk.3.attn_q.
_LAYER = re.compile(r"(?:[\w-]+\.)*?(?:layers|h|blk|blocks)\.(\d{1,6})\.")


def bind(program: Program, checkpoint: Checkpoint) -> Binding:
    """Bind the program. Raises WeightsError unless the checkpoint matches it exactly; for a part of
    a model, unless it has what the part needs."""
    shapes = program.source_shapes()
    names = _names(shapes, checkpoint)
    expected = {names[source]: shape for source, shape in shapes.items()}
    present = set(checkpoint.names)
    mtp = _mtp_names(set(expected), present)
    tied_source = names.get(_tied_source(program) or "")
    problems = [
        f"{name} is missing (shape {list(shape)} is needed){_missing_reason(name)}"
        for name, shape in expected.items()
        if name not in present
    ]
    for name in checkpoint.names:
        dtype, shape = checkpoint.describe(name)
        if name in expected:
            if shape != expected[name]:
                problems.append(
                    f"{name} has shape {list(shape)}; {checkpoint.described_by} asks for "
                    f"{list(expected[name])}"
                )
            if dtype not in NUMPY_TYPES:
                problems.append(f"{name} is {dtype}; f32, f16 and bf16 are supported")
        elif name == TIED_COPY and tied_source in present:
            if not _same_bytes(checkpoint, TIED_COPY, tied_source):
                problems.append(
                    f"{TIED_COPY} differs from {tied_source}, but config.json ties them; "
                    "set tie_word_embeddings to false, or remove it"
                )
        elif not (BUFFERS.fullmatch(name) or program.is_part or name in mtp):
            problems.append(f"{name} (shape {list(shape)}) is not part of {program.name}")
    cause, layers = _other_layers(set(expected), present - mtp, checkpoint.described_by)
    left = [one for one in problems if _layer_of(one) not in layers]
    if len(left) < len(problems) - 1:  # a layer has several weights
        problems = [cause, *left]
    raise_problems(
        f"{checkpoint.path}: weights and {checkpoint.described_by} disagree",
        problems,
        advice="They are of two models, or one is damaged: take both from one download",
    )
    return Binding(checkpoint, names)


def ignored_mtp(program: Program, checkpoint: Checkpoint) -> list[str]:
    """Return the weights of layers that predict further tokens: the program has none of them, and
    no answer depends on them."""
    names = _names(program.source_shapes(), checkpoint)
    return sorted(_mtp_names(set(names.values()), set(checkpoint.names)))


def _mtp_names(expected: Set[str], present: Set[str]) -> frozenset[str]:
    """Return the names of such layers among those that are not expected."""
    asked = frozenset(map(_layer_of, expected))
    marked = frozenset(_layer_of(name) for name in present if name.endswith(MTP_PARTS))
    layers = marked - asked - {None}
    return frozenset(
        name for name in present - expected if _MTP_NAME.match(name) or _layer_of(name) in layers
    )


def _other_layers(
    expected: Set[str], present: Set[str], described_by: str
) -> tuple[str, frozenset[int]]:
    """Return what is wrong with the number of layers, and the layers that only one side has."""
    asked = frozenset(map(_layer_of, expected)) - {None}
    found = frozenset(map(_layer_of, present)) - {None}
    other = {layer for layer in asked ^ found if layer is not None}
    if not (asked and found and other) or min(other) < min(len(asked), len(found)):
        return "", frozenset()
    setting = " (num_hidden_layers)" if described_by == "config.json" else ""
    cause = (
        f"there are weights of {len(found)} layers, and {described_by} asks for {len(asked)}"
        f"{setting}; correct the number if it was changed"
    )
    return cause, frozenset(other)


def _layer_of(name: str) -> int | None:
    """Return the number of the layer in the name of a weight, or in a problem that begins so."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def _names(sources: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, str]:
    """Return the checkpoint's name of each source."""
    words = Counter(source.split(".", 1)[0] for source in sources)
    prefix = f"{words.most_common(1)[0][0]}."
    bare = {source: source.removeprefix(prefix) for source in sources}
    present = checkpoint.names
    is_bare = not any(name.startswith(prefix) for name in present)
    # Errors about a file of a different model use full names.
    if is_bare and not set(present).isdisjoint(bare.values()):
        return bare
    return {source: source for source in sources}


def _tied_source(program: Program) -> str | None:
    """Return the source of the embedding if it is also the head."""
    ops = [op for segment in program.segments.values() for op in segment]
    products = {op.weight for op in ops if isinstance(op, Linear)}
    for op in ops:
        if isinstance(op, Embed) and op.weight in products:
            return program.weights[op.weight].parts[0].source
    return None


def _missing_reason(name: str) -> str:
    if name == TIED_COPY:
        return "; if the head is the embedding, config.json must say tie_word_embeddings true"
    return ""


def _same_bytes(checkpoint: Checkpoint, one: str, other: str) -> bool:
    left, right = checkpoint.tensor(one), checkpoint.tensor(other)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    size = COMPARED_ROWS * max(1, len(left.raw) // max(1, left.shape[0]))
    same = all(
        np.array_equal(left.raw[i : i + size], right.raw[i : i + size])
        for i in range(0, len(left.raw), size)
    )
    checkpoint.release(one)
    checkpoint.release(other)
    return same
