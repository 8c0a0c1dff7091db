"""Batches for measuring sampling alone, in `quire bench kernels`: rows with equal parameters.

The parameters are the common ones; each batch is compared with the NumPy twin before it is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.parts import NoiseKeys, Truncation
from quire.sampling.reference import choose as reference_choose

ASKED: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "top_k 50, top_p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
        "greedy, 5 log-probabilities": {"num_logprobs": 5},
    }
)
CHECKED_ROWS = 2


def choice_batch(num_rows: int, asked: Mapping[str, float]) -> SampleBatch:
    """Return a batch in which all rows have these parameters, each with its own seed."""

    def rows(value: float, dtype: type[Any]) -> NDArray[Any]:
        return np.full(num_rows, value, dtype)

    truncation = None
    if asked.keys() & {"top_k", "top_p"}:
        truncation = Truncation(
            top_k=rows(asked.get("top_k", 0), np.int32),
            top_p=rows(asked.get("top_p", 1.0), np.float32),
            min_p=rows(0.0, np.float32),
        )
    num_logprobs = asked.get("num_logprobs")
    return SampleBatch(
        positions=rows(0, np.int32),
        temperature=rows(asked.get("temperature", 0.0), np.float32),
        noise=NoiseKeys(seeds=np.arange(num_rows, dtype=np.int64), streams=rows(0, np.int32)),
        truncation=truncation,
        num_logprobs=None if num_logprobs is None else rows(num_logprobs, np.int32),
    )


def check_choice(
    found: TokenChoice, logits: NDArray[np.float32], asked: Mapping[str, float], what: str
) -> None:
    """Raise WorkerError unless the first rows equal the twin's, bit for bit."""
    count = min(CHECKED_ROWS, len(logits))
    wanted = reference_choose(logits[:count].copy(), choice_batch(count, asked))
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        if not np.array_equal(getattr(found, name)[:count], getattr(wanted, name), equal_nan=True):
            raise WorkerError(
                f"token choice ({what}) is not what NumPy makes of the same logits ({name}); "
                "no times of wrong results are reported"
            )
