"""Binds a program's parameter table to a checkpoint: strict both ways, all problems together.

A missing tensor, an unexpected one and one of a wrong shape are errors. What is accepted beyond
the table: buffers that old checkpoints carry though they can be computed (BUFFERS); a copy of the
embedding as `lm_head.weight` where the head is tied, if it is the same bytes; rows of a source
that no part takes. A program names its sources in full (`transformer.h.0...`); where no name of
the checkpoint begins with the word that most sources begin with, the file was written from the
decoder alone, and its names are taken to lack that word (`h.0...`). Reads no values but those two
matrices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
# Rotary frequencies; GPT-2's causal mask and what it puts where nothing is seen.
BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


# Elements of a quantized tensor that become float32 together: few, so that caches hold them.
PIECE_ELEMENTS = 1 << 19
PIECE_ROWS = 32  # a multiple of: kernels' panels have so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows for a weight: `rows` of them from `first_row` on of a tensor [of_rows, columns], or
    [columns, of_rows] where transposed, whose bytes are `raw`; is_content: what is digested."""

    raw: NDArray[np.uint8]
    dtype: str
    rows: int
    first_row: int
    of_rows: int
    transposed: bool
    is_content: bool


class Binding:
    """A checkpoint that holds what a program needs, asked by the parts of its weights."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self.checkpoint = checkpoint
        self._names = names  # the checkpoint's, by the program's

    def tensor(self, part: WeightPart) -> StoredTensor:
        """The whole tensor that `part` is cut from, as stored."""
        return self.checkpoint.tensor(self._names[part.source])

    def content(self, part: WeightPart) -> StoredTensor:
        """What is digested of the tensor that `part` is cut from."""
        return self.checkpoint.content(self._names[part.source])

    def pieces(self, part: WeightPart) -> Iterator[Callable[[], Piece]]:
        """The part's rows in order, each piece made when it is called for, in any thread: the
        stored tensor, or of a quantized one some rows at a time as float32."""
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
        """A fresh float32 copy of the part's rows: [rows, columns], or [rows] of a vector."""
        name, rows = self._names[part.source], slice(part.first_row, part.first_row + part.rows)
        if part.transposed:
            return np.ascontiguousarray(self.checkpoint.read_f32(name)[:, rows].T)
        return self.checkpoint.read_f32(name, rows)

    def fp8(self, part: WeightPart) -> Fp8Stored | None:
        """The part's rows, where its tensor is stored in fp8."""
        stored = None if part.transposed else self.checkpoint.fp8(self._names[part.source])
        return None if stored is None else stored.rows(part.first_row, part.rows)

    def release(self, part: WeightPart) -> None:
        """Drop the pages of the tensor that `part` is cut from."""
        self.checkpoint.release(self._names[part.source])


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


def bind(program: Program, checkpoint: Checkpoint) -> Binding:
    """Raises WeightsError unless the checkpoint is exactly what the program needs."""
    shapes = program.source_shapes()
    names = _names(shapes, checkpoint)
    expected = {names[source]: shape for source, shape in shapes.items()}
    present = set(checkpoint.names)
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
                problems.append(f"{name} is {dtype}; f32, f16 and bf16 can be computed with")
        elif name == TIED_COPY and tied_source in present:
            if not _same_bytes(checkpoint, TIED_COPY, tied_source):
                problems.append(
                    f"{TIED_COPY} differs from {tied_source}, but config.json ties them; "
                    "set tie_word_embeddings to false, or remove it"
                )
        elif not BUFFERS.fullmatch(name):
            problems.append(f"{name} (shape {list(shape)}) is not part of {program.name}")
    raise_problems(f"{checkpoint.path}: weights and {checkpoint.described_by} disagree", problems)
    return Binding(checkpoint, names)


def _names(sources: Mapping[str, object], checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's name of each source."""
    words = Counter(source.split(".", 1)[0] for source in sources)
    prefix = f"{words.most_common(1)[0][0]}."
    bare = {source: source.removeprefix(prefix) for source in sources}
    present = checkpoint.names
    is_bare = not any(name.startswith(prefix) for name in present)
    # A file of another model altogether is told in full names.
    if is_bare and not set(present).isdisjoint(bare.values()):
        return bare
    return {source: source for source in sources}


def _tied_source(program: Program) -> str | None:
    """The source of the embedding where it is the head too."""
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
