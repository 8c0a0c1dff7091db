"""Sizes that steps are captured in: as which one a step is launched, and up to where that pays.

A captured step has room for so many rows and for no other number of them, so a step is padded to a
size of a few ladders. Steps of one token a sequence always are; mixed ones (chunks of prompts, with
rows that decode beside them or without) up to the tokens that a device computes in the time in
which the host launches a step kernel by kernel. Up to there a replayed step is usually the sooner
one, padding included; beyond, the host is ready before the device anyway. Knows what a
program costs; no kernels, no graphs. Always holds: there are few sizes, whatever steps come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.execute.executor import StepLimits
from quire.program.batch import ForwardBatch
from quire.program.cost import StepShape
from quire.program.program import Program

# What the host takes for one launch, since Triton's launcher is Python: measured beside an H200.
LAUNCH_S = 55e-6
# What a large card reaches in bf16 products of some hundred rows. A slower one has only less to
# gain: nothing is wrong where these are.
OPS_PER_S = 6e14
MAX_MIXED = 8192  # tokens: a small model's step, too, is long by then
FEWEST_MIXED = 16
FEW_CHUNKS = 16  # prompts side by side in a usual step


@dataclass(frozen=True, slots=True)
class Size:
    """What a captured step has room for: token rows; sequences, of which `chunks` may have several
    rows (0: each has one)."""

    tokens: int
    sequences: int
    chunks: int = 0

    @property
    def sample_rows(self) -> tuple[int, ...]:
        """Rows that its head may have, ascending: one a sequence, or all."""
        return (self.sequences, self.tokens) if self.chunks else (self.sequences,)


def ladder(most: int) -> tuple[int, ...]:
    """Return sizes up to `most`: close where few rows wait for launches, then in steps."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 513, 32)]
    sizes += range(576, max(most, 576) + 64, 64)
    return (*(size for size in sizes if size < most), most)


def mixed_ladder(most: int) -> tuple[int, ...]:
    """Return sizes up to `most`, two for each doubling, since each is captured with several numbers
    of sequences; whole numbers of 16, the last one too. None where `most` is less."""
    top = most - most % FEWEST_MIXED
    sizes = [size << n for n in range(max(most, 1).bit_length()) for size in (16, 24)]
    found = [size for size in sizes if size < top and size != 24]
    return (*found, top) if top else ()


def max_mixed(program: Program, num_launches: int) -> int:
    """Return tokens that a device computes while the host launches a step of so many kernels."""
    each = program.segment_cost("trunk", StepShape([1], [0])).product_ops
    return min(int(num_launches * LAUNCH_S * OPS_PER_S / max(each, 1)), MAX_MIXED)


class Sizes:
    """Of an executor for steps of at most `limits`, mixed ones of at most `mixed` tokens."""

    def __init__(self, limits: StepLimits, *, mixed: int) -> None:
        tokens, sequences = limits.max_tokens, limits.max_sequences
        self.ones = ladder(min(tokens, sequences))
        self.mixed = mixed_ladder(min(mixed, tokens))
        four_times = (FEWEST_MIXED << 2 * n for n in range(sequences.bit_length()))
        self._together = (*(size for size in four_times if size < sequences), sequences)

    def of(self, batch: ForwardBatch) -> Size | None:
        """Return the size a step is launched as; None: as it is."""
        tokens, sequences = len(batch.token_ids), len(batch.seq_starts) - 1
        chunks = int(np.count_nonzero(np.diff(batch.seq_starts) > 1))
        if not chunks:
            rows = _next(self.ones, sequences)
            return Size(rows, rows)
        if not self.mixed or tokens > self.mixed[-1]:
            return None
        rows = _next(self.mixed, tokens)
        together = min(_next(self._together, sequences), rows)
        return Size(rows, together, min(together, FEW_CHUNKS) if chunks <= FEW_CHUNKS else together)

    def all_mixed(self) -> Iterator[Size]:
        """Yield those of steps with few chunks."""
        for rows in self.mixed:
            for together in sorted({min(size, rows) for size in self._together}):
                yield Size(rows, together, min(together, FEW_CHUNKS))


def _next(sizes: Sequence[int], rows: int) -> int:
    return sizes[bisect_left(sizes, rows)]
