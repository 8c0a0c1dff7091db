"""StepShape and Cost: rows and depths of a step, and the arithmetic and bytes they need.

An operation's class counts its cost (ops.py), a Program adds them up.

Counted is what the mathematics needs, not what an executor happens to do: a multiplication and an
addition are two operations; each operation reads its weights once a step; a cached key or value is
read once a sequence and layer, a buffer element once for each operation that reads or writes it. So
the largest of bytes over bandwidth and operations over peak is a floor. Knows no machine and no
clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.program.declarations import PIECE_POSITIONS
from quire.program.tensors import Rows

Int64s = NDArray[np.int64]


class StepShape:
    """Rows and depths of a step: sequence i computes `counts[i]` tokens after `starts[i]` others.

    `num_samples` rows go through the head (default: one a sequence).
    """

    def __init__(
        self, counts: Iterable[int], starts: Iterable[int], *, num_samples: int | None = None
    ) -> None:
        self.counts: Int64s = np.array(list(counts), np.int64)
        self.starts: Int64s = np.array(list(starts), np.int64)
        if len(self.counts) != len(self.starts):
            raise ValueError(f"{len(self.counts)} counts and {len(self.starts)} starts")
        if (self.counts < 0).any() or (self.starts < 0).any():
            raise ValueError("counts and starts must not be negative")
        samples = len(self.counts) if num_samples is None else num_samples
        self._rows = {
            Rows.TOKENS: int(self.counts.sum()),
            Rows.SAMPLES: samples,
            Rows.SEQUENCES: len(self.counts),
        }

    def rows(self, rows: Rows) -> int:
        """Return the number behind a symbolic row count."""
        return self._rows[rows]

    def attended_positions(self, window: int) -> int:
        """Return pairs of a token row and a position it attends to, over all rows (window 0: no
        limit)."""
        reach = self.starts + self.counts
        seen = _triangle(reach) - _triangle(self.starts)
        if window:
            hidden = _triangle(np.maximum(reach - window, 0))
            seen -= hidden - _triangle(np.maximum(self.starts - window, 0))
        return int(seen.sum())

    def attended_pieces(self, window: int, rank: int = 0, ranks: int = 1) -> int:
        """Return pairs of a token row and a piece of the cache that it attends to, over all rows;
        of the pieces that `rank` of several ranks has."""
        reach = self.starts + self.counts
        num = _own_pieces(reach, rank, ranks) - _own_pieces(self.starts, rank, ranks)
        if window:  # pieces before that of the first position that a row attends to
            hidden = _own_pieces(np.maximum(reach - window + 1, 0), rank + 1, ranks)
            num -= hidden - _own_pieces(np.maximum(self.starts - window + 1, 0), rank + 1, ranks)
        return int(num.sum())

    def read_positions(self, window: int) -> int:
        """Return cached positions that any row attends to, counted once per sequence."""
        first = np.maximum(self.starts - window + 1, 0) if window else np.zeros_like(self.starts)
        return int((self.starts + self.counts - first)[self.counts > 0].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Operations of one kind of work or of several; bytes by where they come from.

    product_ops: of weight products. attention_ops: of the two products of attention. other_ops:
    all the rest, roughly (an exponential counts as one). weight_bytes and kv_bytes come from
    memory; buffer_bytes are the step's own and may stay in caches. comm_bytes are received from
    other ranks.
    """

    product_ops: int = 0
    attention_ops: int = 0
    other_ops: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    buffer_bytes: int = 0
    comm_bytes: int = 0

    @property
    def operations(self) -> int:
        """All arithmetic operations."""
        return self.product_ops + self.attention_ops + self.other_ops

    @property
    def memory_bytes(self) -> int:
        """Bytes that must come from memory: weights and cached keys and values."""
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            product_ops=self.product_ops + other.product_ops,
            attention_ops=self.attention_ops + other.attention_ops,
            other_ops=self.other_ops + other.other_ops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            buffer_bytes=self.buffer_bytes + other.buffer_bytes,
            comm_bytes=self.comm_bytes + other.comm_bytes,
        )


def _triangle(length: Int64s) -> Int64s:
    """1 + 2 + ... + length."""
    total: Int64s = length * (length + 1) // 2
    return total


def _own_pieces(end: Int64s, rank: int, ranks: int) -> Int64s:
    """Return the pieces that a rank has up to that of a position, summed over the positions before
    `end`; piece p is rank p modulo `ranks`'."""
    piece, rest = np.divmod(end, PIECE_POSITIONS)
    turns, left = np.divmod(np.maximum(piece - rank, 0), ranks)
    whole = ranks * _triangle(turns) + left * (turns + 1)
    own = np.where(piece < rank, 0, turns + 1)
    total: Int64s = PIECE_POSITIONS * whole + rest * own
    return total
