"""Token choice and scores on the host, from logits there: compiled kernels where they are, else the
plain NumPy twins, which choose the same tokens.

For what the device's own token choice does not do. Knows no tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.sampling import reference, scoring
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores

Float32s = NDArray[np.float32]


def choose_on_host(logits: Float32s, batch: SampleBatch) -> TokenChoice:
    """Return a token for each row."""
    pool = _pool()
    if pool is None:
        return reference.choose(logits, batch)
    from quire.sampling import native

    return native.choose(logits, batch, pool)


def score_on_host(logits: Float32s, batch: ScoreBatch) -> Scores:
    """Return how likely known tokens are."""
    pool = _pool()
    if pool is None:
        return scoring.score(logits, batch)
    from quire.sampling import native_scoring

    return native_scoring.score(logits, batch, pool)


@cache
def _pool() -> Any:
    """Return one thread of the compiled module, or None where it was not compiled."""
    try:
        from quire import _native
    except ImportError:
        return None
    return _native.Pool(1)
