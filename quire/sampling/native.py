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
from quire.sampling.batch import RareParameters, SampleBatch, TokenChoice
from quire.sampling.reference import check_known, check_shapes, has_mirostat


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
    candidates = params.candidates(num_rows)
    choice = TokenChoice(
        token_ids=np.empty(num_rows, np.int32),
        logprobs=np.empty(num_rows, np.float32),
        top_ids=np.empty((num_rows, params.num_top), np.int32),
        top_logprobs=np.empty((num_rows, params.num_top), np.float32),
        mus=np.empty(num_rows if params.has_mirostat else 0, np.float32),
        candidates=candidates,
    )
    if num_rows > 0:
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


_NO_CANDIDATES = (
    np.empty((0, 0), np.int32),
    np.empty((0, 0), np.float32),
    np.empty((0, 0), np.float32),
)


class _ChooseParams:
    """All of a batch but its positions, checked against logits of a shape, as the kernels take
    it."""

    def __init__(self, logits: NDArray[np.float32], batch: SampleBatch) -> None:
        check_shapes(logits, batch)
        check_known(batch)
        self.num_top = max(0, int(batch.num_logprobs.max(initial=-1)))
        self.has_mirostat = has_mirostat(batch)
        self._has_beams = len(batch.num_candidates) > 0
        self._max_candidates = int(batch.num_candidates.max(initial=0))
        self.native = _native.ChooseParams(
            **_arrays(batch, _FIELDS),
            rare=None if batch.rare is None else _arrays(batch.rare, _RARE_FIELDS),
            mask_rows=np.ascontiguousarray(batch.mask_rows, np.int32),
            masks=np.ascontiguousarray(batch.masks, np.uint32),
            num_candidates=np.ascontiguousarray(batch.num_candidates, np.int32),
        )

    def candidates(self, num_rows: int) -> Candidates | None:
        """Allocate the candidates of beam rows."""
        if not self._has_beams:
            return None
        shape = num_rows, self._max_candidates
        return Candidates(
            ids=np.empty(shape, np.int32),
            scores=np.empty(shape, np.float32),
            logprobs=np.empty(shape, np.float32),
        )


_Fields = tuple[tuple[str, type[np.generic]], ...]


def _arrays(record: SampleBatch | RareParameters, names: _Fields) -> dict[str, NDArray[Any]]:
    return {name: np.ascontiguousarray(getattr(record, name), dtype) for name, dtype in names}


_FIELDS: _Fields = (
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("repetition_penalty", np.float32),
    ("presence_penalty", np.float32),
    ("frequency_penalty", np.float32),
    ("seeds", np.int64),
    ("streams", np.int32),
    ("num_prompt_tokens", np.int32),
    ("num_logprobs", np.int32),
    ("history_starts", np.int32),
    ("history", np.int32),
    ("bias_starts", np.int32),
    ("bias_ids", np.int32),
    ("bias_values", np.float32),
    ("banned_starts", np.int32),
    ("banned_ids", np.int32),
)
_RARE_FIELDS: _Fields = (
    ("typical_p", np.float32),
    ("top_n_sigma", np.float32),
    ("epsilon_cutoff", np.float32),
    ("eta_cutoff", np.float32),
    ("xtc_probability", np.float32),
    ("xtc_threshold", np.float32),
    ("dry_multiplier", np.float32),
    ("dry_base", np.float32),
    ("dry_allowed_length", np.int32),
    ("dry_last_n", np.int32),
    ("ngram_size", np.int32),
    ("mirostat", np.int32),
    ("mirostat_tau", np.float32),
    ("mirostat_eta", np.float32),
    ("mirostat_mu", np.float32),
    ("breaker_starts", np.int32),
    ("breaker_ids", np.int32),
    ("sequence_rows", np.int32),
    ("sequence_starts", np.int32),
    ("sequence_ids", np.int32),
    ("allowed_starts", np.int32),
    ("allowed_ids", np.int32),
)
