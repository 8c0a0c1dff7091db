"""Score known tokens with the native kernel: a slice of rows in one call, without the GIL.

Equals the NumPy reference (sampling/scoring.py), bit for bit, for any number of threads and rows
and any order of rows. Knows no requests; the executor owns the thread pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.sampling.scoring import ScoreBatch, Scores, check_shapes


def score(logits: NDArray[np.float32], batch: ScoreBatch, pool: _native.Pool) -> Scores:
    """Return the scores of logits [R, V] (not modified), with the pool's threads.

    Raises ValueError for inconsistent shapes.
    """
    check_shapes(logits, batch)
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    scores = Scores.empty(batch)
    if len(logits) == 0:
        return scores
    _native.score(
        pool,
        logits=logits,
        **{name: np.ascontiguousarray(getattr(batch, name), np.int32) for name in _WISHES},
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
        listed_logprobs=scores.listed_logprobs,
    )
    return scores


_WISHES = ("targets", "num_top", "listed_starts", "listed_ids")
