"""Sample tokens with the native kernels: the whole batch in one call, without the GIL.

Chooses the same tokens as the NumPy reference (sampling/reference.py), bit for bit, for any number
of threads and rows and any order of rows. Knows no requests; the executor owns the thread pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.records import Candidates
from quire.sampling.batch import (
    SampleBatch,
    TokenChoice,
    check_known,
    check_shapes,
    has_mirostat,
    max_top,
    names_of,
)

# Outputs that no row of a batch has: the kernels take writable arrays.
_NO_FLOATS = np.empty(0, np.float32)
_NO_IDS, _NO_TABLE = np.empty((0, 0), np.int32), np.empty((0, 0), np.float32)
_NO_CANDIDATES = (_NO_IDS, _NO_TABLE, _NO_TABLE)


def choose(logits: NDArray[np.float32], batch: SampleBatch, pool: _native.Pool) -> TokenChoice:
    """Sample a token for each row of logits [R, V] (not modified), with the pool's threads.

    Raises ValueError for inconsistent shapes.
    """
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    params = batch.prepared.get(logits.shape)
    if params is None:
        params = batch.prepared[logits.shape] = _ChooseParams(logits, batch)
    num_rows = len(logits)
    choice = params.empty_choice(num_rows)
    if num_rows > 0:
        candidates = choice.candidates
        _native.choose(
            pool,
            params.native,
            logits,
            np.ascontiguousarray(batch.positions, np.int32),
            choice.token_ids,
            choice.logprobs,
            choice.top_ids,
            choice.top_logprobs,
            choice.mus,
            *(_NO_CANDIDATES if candidates is None else _arrays_of(candidates)),
        )
    return choice


def _arrays_of(candidates: Candidates) -> tuple[NDArray[Any], ...]:
    return candidates.ids, candidates.scores, candidates.logprobs


class _ChooseParams:
    """All of a batch but its positions, checked against the shape of the logits, as the kernels
    take it."""

    def __init__(self, logits: NDArray[np.float32], batch: SampleBatch) -> None:
        check_shapes(logits, batch)
        check_known(batch)
        self._num_top = None if batch.num_logprobs is None else max_top(batch.num_logprobs)
        self._has_mirostat = has_mirostat(batch)
        self._max_candidates: int | None = None
        if batch.num_candidates is not None:
            self._max_candidates = int(batch.num_candidates.max(initial=0))
        arrays: dict[str, NDArray[Any]] = {}
        _add_arrays(arrays, "", batch)
        del arrays["positions"]
        self.native = _native.ChooseParams(arrays)

    def empty_choice(self, num_rows: int) -> TokenChoice:
        """Allocate what the kernels write."""
        logprobs, top_ids, top_logprobs = _NO_FLOATS, _NO_IDS, _NO_TABLE
        if self._num_top is not None:
            logprobs = np.empty(num_rows, np.float32)
            top_ids = np.empty((num_rows, self._num_top), np.int32)
            top_logprobs = np.empty((num_rows, self._num_top), np.float32)
        return TokenChoice(
            token_ids=np.empty(num_rows, np.int32),
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            mus=np.empty(num_rows, np.float32) if self._has_mirostat else _NO_FLOATS,
            candidates=self._candidates(num_rows),
        )

    def _candidates(self, num_rows: int) -> Candidates | None:
        if self._max_candidates is None:
            return None
        shape = num_rows, self._max_candidates
        return Candidates(
            ids=np.empty(shape, np.int32),
            scores=np.empty(shape, np.float32),
            logprobs=np.empty(shape, np.float32),
        )


def _add_arrays(arrays: dict[str, NDArray[Any]], prefix: str, part: Any) -> None:
    """Add the arrays of a part, and of its parts, by their path: "rare_dry_base"."""
    for name in names_of(type(part)):  # type: ignore[arg-type]
        value = getattr(part, name)
        if isinstance(value, np.ndarray):
            arrays[prefix + name] = np.ascontiguousarray(value)
        elif value is not None:
            _add_arrays(arrays, f"{prefix}{name}_", value)
