"""Dtypes, symbolic row counts, buffers and views: what operations read and write.

Knows no operation. Always holds: a row count is a symbol, never a number of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """Storage types of buffers, weights and caches."""

    F32 = "f32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.F32 else 2


class Rows(StrEnum):
    """Symbolic row counts; a step gives the numbers."""

    TOKENS = "tokens"
    SAMPLES = "samples"
    SEQUENCES = "sequences"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A [rows, width] array, placed in memory once for the largest step."""

    index: int
    name: str
    rows: Rows
    width: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class View:
    """`width` columns of a buffer from column `offset`; the row stride is the buffer's."""

    buffer: Buffer
    offset: int
    width: int

    @property
    def dtype(self) -> DType:
        """The buffer's dtype."""
        return self.buffer.dtype

    def columns(self, offset: int, width: int) -> View:
        """Return a narrower view of the same rows."""
        if offset < 0 or width <= 0 or offset + width > self.width:
            raise ValueError(
                f"columns {offset}..{offset + width} of view {self.buffer.name} of width "
                f"{self.width}"
            )
        return View(self.buffer, self.offset + offset, width)

    def __str__(self) -> str:
        if self.offset == 0 and self.width == self.buffer.width:
            return self.buffer.name
        return f"{self.buffer.name}[{self.offset}:{self.offset + self.width}]"
