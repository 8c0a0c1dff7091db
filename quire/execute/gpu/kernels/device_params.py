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

from quire.sampling.batch import SampleBatch
from quire.sampling.parts import RareParameters
from quire.sampling.rare import SMALLEST_SHARE

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
        """Return those of a batch."""
        return cls.seen_in(to_device(words_of(batch)))

    @classmethod
    def seen_in(cls, words: torch.Tensor) -> DeviceSamplingParams:
        """Return what words_of() gave, int32 [WORDS, R]."""
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
    """Return a batch's numbers as int32 [WORDS, R]; the seeds take the first two rows together."""
    truncation = batch.truncation
    words = np.zeros((WORDS, len(batch.temperature)), np.int32)
    words[:2] = np.ascontiguousarray(batch.noise.seeds, np.int64).view(np.int32).reshape(2, -1)
    floats = words[2:5].view(np.float32)
    floats[0] = batch.temperature
    floats[1] = 1.0 if truncation is None else truncation.top_p
    if truncation is not None:
        floats[2], words[5] = truncation.min_p, truncation.top_k
    words[6:] = batch.noise.streams, batch.positions
    return words


def rows_for_the_host(batch: SampleBatch) -> NDArray[np.bool_]:
    """Return the rows that use what the kernels do not do [R]. These are all RareParameters
    (typical_p, top_n_sigma, cutoffs, XTC, DRY, n-grams, banned sequences, allowed ids, mirostat,
    an order of its own), beams, and a bias that names an id twice (its f32 sums have an order)."""
    rows = np.zeros(len(batch.temperature), bool)
    if batch.num_candidates is not None:
        rows |= batch.num_candidates > 0
    if batch.rare is not None:
        _add_rare(rows, batch.rare)
    if batch.logit_bias is not None:
        biased = batch.logit_bias.tokens
        for row in np.flatnonzero(np.diff(biased.starts) > 1).tolist():
            rows[row] |= len(np.unique(biased[row])) < len(biased[row])
    return rows


def _add_rare(rows: NDArray[np.bool_], rare: RareParameters) -> None:
    """Add the rows that use some of `rare` to `rows` [R], in place."""
    if rare.truncation is not None:
        rows |= rare.truncation.typical_p < 1.0
        rows |= rare.truncation.top_n_sigma > 0
        rows |= rare.truncation.epsilon_cutoff >= SMALLEST_SHARE
        rows |= rare.truncation.eta_cutoff >= SMALLEST_SHARE
        rows |= rare.truncation.xtc_probability > 0
    if rare.dry is not None:
        rows |= rare.dry.multiplier > 0
    if rare.ngram_size is not None:
        rows |= rare.ngram_size > 0
    if rare.mirostat is not None:
        rows |= rare.mirostat.mode > 0
    if rare.banned_sequences is not None:
        rows |= np.diff(rare.banned_sequences.rows) > 0
    if rare.allowed is not None:
        rows |= np.diff(rare.allowed.starts) > 0
    if rare.order is not None:
        rows |= rare.order != 0
