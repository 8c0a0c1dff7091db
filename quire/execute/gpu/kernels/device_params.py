"""What rows wish of their token choice, as tensors; and which rows the device leaves to the host.

The numbers of a batch that kernels read go to the device in one copy. Always holds: nothing a row
asks for is dropped: what kernels here do not do is named by `rows_for_the_host`, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.sampling.batch import RareParameters, SampleBatch
from quire.sampling.rare import SMALLEST_SHARE
from quire.sampling.reference import MIROSTAT

WORDS = 8  # 32-bit numbers a row
# Takes an array to where the logits are.
ToDevice = Callable[[NDArray[Any]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceSamplingParams:
    """Of R rows: f32 temperature, top_p, min_p; int32 top_k, streams, positions; int64 seeds."""

    words: torch.Tensor  # int32 [WORDS, R]: all of the others are views of it
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    streams: torch.Tensor
    positions: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def of(cls, batch: SampleBatch, to_device: ToDevice = torch.from_numpy) -> DeviceSamplingParams:
        """Those of a batch."""
        return cls.seen_in(to_device(words_of(batch)))

    @classmethod
    def seen_in(cls, words: torch.Tensor) -> DeviceSamplingParams:
        """What words_of() gave, int32 [WORDS, R]."""
        return cls(
            words=words,
            seeds=words[:2].view(-1).view(torch.int64),
            temperature=words[2].view(torch.float32),
            top_p=words[3].view(torch.float32),
            min_p=words[4].view(torch.float32),
            top_k=words[5],
            streams=words[6],
            positions=words[7],
        )


def words_of(batch: SampleBatch) -> NDArray[np.int32]:
    """A batch's numbers as int32 [WORDS, R]; the seeds take the first two rows together."""
    words = np.empty((WORDS, len(batch.temperature)), np.int32)
    words[:2] = np.ascontiguousarray(batch.seeds, np.int64).view(np.int32).reshape(2, -1)
    for row, values in enumerate((batch.temperature, batch.top_p, batch.min_p), start=2):
        words[row] = np.ascontiguousarray(values, np.float32).view(np.int32)
    words[5:] = batch.top_k, batch.streams, batch.positions
    return words


def rows_for_the_host(batch: SampleBatch) -> NDArray[np.bool_]:
    """[R]: rows that ask for what the kernels do not do. These are all RareParameters (typical_p,
    top_n_sigma, cutoffs, XTC, DRY, n-grams, banned sequences, allowed ids, mirostat), beams, and a
    bias that names an id twice (its f32 sums have an order)."""
    rows = np.zeros(len(batch.temperature), bool)
    if len(batch.num_candidates):
        rows |= batch.num_candidates > 0
    if batch.rare is not None:
        rows |= _rare(batch.rare)
    for row in np.flatnonzero(np.diff(batch.bias_starts) > 1):
        ids = batch.bias_ids[batch.bias_starts[row] : batch.bias_starts[row + 1]]
        rows[row] |= len(np.unique(ids)) < len(ids)
    return rows


def _rare(rare: RareParameters) -> NDArray[np.bool_]:
    some: NDArray[np.bool_] = (
        (rare.typical_p < 1.0)
        | (rare.top_n_sigma > 0)
        | (rare.epsilon_cutoff >= SMALLEST_SHARE)
        | (rare.eta_cutoff >= SMALLEST_SHARE)
        | (rare.xtc_probability > 0)
        | (rare.dry_multiplier > 0)
        | (rare.ngram_size > 0)
        | (rare.mirostat == MIROSTAT)
        | (np.diff(rare.sequence_rows) > 0)
        | (np.diff(rare.allowed_starts) > 0)
    )
    return some
