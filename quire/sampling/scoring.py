"""Scores of known tokens: their definition, in NumPy.

For a row with raw logits l [V]: log-probabilities are l - logsumexp(l), as in step 1 of
sampling/batch.py, with a sum that is exact in any order. A row may request those of a target token
and its rank, of the best alternatives, and of listed ids. Knows no requests and samples nothing.
Invariant: a row's result depends on its own logits and parameters only; a row with NaN, +inf or
nothing above -inf fails without affecting others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.sampling.noise import MAX_VOCAB
from quire.sampling.parts import Float32s, Int32s
from quire.sampling.reference import log_probabilities

MAX_TOP = 20
FAILED = -1  # as a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBatch:
    """The requested scores of R rows; ragged ids are given by starts [R + 1] into a flat array.

    targets: a token id, -1 for none. num_top: number of alternatives (0 to MAX_TOP).
    """

    targets: Int32s  # [R]
    num_top: Int32s  # [R]
    listed_starts: Int32s  # [R + 1]
    listed_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """logprobs [R] of the targets, NaN where there is none or the row failed. ranks [R]: 1 for
    the largest logit, ties to the lower id; 0 without a target, FAILED where the row failed.
    top_ids, top_logprobs [R, K], best first (ties: lower id first), -1 and NaN where unused.
    listed_logprobs: as the batch's listed_ids.
    """

    logprobs: Float32s
    ranks: Int32s
    top_ids: Int32s
    top_logprobs: Float32s
    listed_logprobs: Float32s

    @classmethod
    def empty(cls, batch: ScoreBatch) -> Scores:
        """Return arrays for the results of `batch`: nothing asked for, so far."""
        num_rows, width = len(batch.targets), int(batch.num_top.max(initial=0))
        return cls(
            logprobs=np.full(num_rows, np.nan, np.float32),
            ranks=np.zeros(num_rows, np.int32),
            top_ids=np.full((num_rows, width), -1, np.int32),
            top_logprobs=np.full((num_rows, width), np.nan, np.float32),
            listed_logprobs=np.full(len(batch.listed_ids), np.nan, np.float32),
        )


def score(logits: NDArray[np.float32], batch: ScoreBatch) -> Scores:
    """Return scores of logits [R, V]. Raises ValueError for inconsistent shapes."""
    check_shapes(logits, batch)
    scores = Scores.empty(batch)
    for row, raw in enumerate(logits):
        if not (raw < np.inf).all() or raw.max() == -np.inf:  # NaN, +inf, or nothing at all
            scores.ranks[row] = FAILED
            continue
        logprobs, target = log_probabilities(raw), batch.targets[row]
        if target >= 0:
            scores.logprobs[row] = logprobs[target]
            before = (raw > raw[target]).sum() + (raw[:target] == raw[target]).sum()
            scores.ranks[row] = before + 1
        best = np.argsort(-raw, kind="stable")[: batch.num_top[row]]
        best = best[raw[best] > -np.inf]
        scores.top_ids[row, : len(best)] = best
        scores.top_logprobs[row, : len(best)] = logprobs[best]
        listed = slice(batch.listed_starts[row], batch.listed_starts[row + 1])
        scores.listed_logprobs[listed] = logprobs[batch.listed_ids[listed]]
    return scores


def check_shapes(logits: NDArray[np.float32], batch: ScoreBatch) -> None:
    """Raise ValueError if logits and batch are inconsistent."""
    rows = len(batch.targets)
    if logits.ndim != 2 or logits.dtype != np.float32 or len(logits) != rows:
        raise ValueError(
            f"logits are {logits.dtype} {logits.shape}; f32 [{rows}, vocabulary] is needed"
        )
    vocabulary = logits.shape[1]
    if not 0 < vocabulary <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {vocabulary}; 1 to {MAX_VOCAB} is allowed")
    for name, values, low, high in (
        ("targets", batch.targets, -1, vocabulary - 1),
        ("listed_ids", batch.listed_ids, 0, vocabulary - 1),
        ("num_top", batch.num_top, 0, MAX_TOP),
    ):
        if len(values) and not low <= values.min() <= values.max() <= high:
            raise ValueError(
                f"{name} holds {values.min()} to {values.max()}; {low} to {high} is allowed"
            )
    starts = batch.listed_starts
    if len(batch.num_top) != rows or len(starts) != rows + 1:
        raise ValueError(f"{len(batch.num_top)} num_top and {len(starts)} starts for {rows} rows")
    if starts[0] != 0 or starts[-1] != len(batch.listed_ids) or (np.diff(starts) < 0).any():
        raise ValueError(f"listed_starts {starts} do not span {len(batch.listed_ids)} listed ids")
