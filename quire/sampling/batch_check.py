"""Check that a SampleBatch is consistent, with itself and with the logits it is for.

Every implementation of sampling calls these before it reads an array. Knows no requests.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from quire.sampling.batch import SampleBatch
from quire.sampling.noise import MAX_VOCAB
from quire.sampling.parts import (
    BannedSequences,
    Int32s,
    LogitBias,
    PerRow,
    RaggedIds,
    RareParameters,
    TokenMasks,
)
from quire.sampling.rare import MAX_REPEAT

# The mode of Mirostat that is implemented, version 2 of it; 0: off.
MIROSTAT = 2


def max_top(num_logprobs: Int32s) -> int:
    """Return the largest number of alternatives of a row."""
    return max(0, int(num_logprobs.max(initial=-1)))


def has_mirostat(batch: SampleBatch) -> bool:
    """Return whether a row uses mirostat."""
    mirostat = None if batch.rare is None else batch.rare.mirostat
    return mirostat is not None and bool((mirostat.mode == MIROSTAT).any())


def check_known(batch: SampleBatch) -> None:
    """Raise ValueError if a row's history lacks its last token."""
    if batch.has_late_tokens:
        raise ValueError("some rows' last tokens are late; SampleBatch.completed adds them")


def check_shapes(logits: NDArray[np.float32], batch: SampleBatch) -> None:
    """Raise ValueError if logits and batch are inconsistent."""
    rows = len(batch.temperature)
    if logits.ndim != 2 or logits.dtype != np.float32 or len(logits) != rows:
        raise ValueError(
            f"logits are {logits.dtype} {logits.shape}; f32 [{rows}, vocabulary] is needed"
        )
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {logits.shape[1]}; 1 to {MAX_VOCAB} is allowed")
    _check_part("", batch, rows, logits.shape[1])


def _check_part(prefix: str, part: PerRow, rows: int, vocabulary: int) -> None:
    """Check the rows, and the ids of what is composed of more."""
    for name in (item.name for item in fields(part) if item.init):
        value, named = getattr(part, name), prefix + name
        if isinstance(value, PerRow):
            _check_part(f"{named}.", value, rows, vocabulary)
        elif isinstance(value, RaggedIds):
            _check_ragged(named, value, rows, vocabulary)
        elif isinstance(value, LogitBias):
            _check_ragged(named, value.tokens, rows, vocabulary)
            if len(value.values) != len(value.tokens.ids):
                raise ValueError(
                    f"{named} has {len(value.values)} values for {len(value.tokens.ids)} ids"
                )
        elif isinstance(value, TokenMasks):
            _check_masks(value, rows, vocabulary)
        elif isinstance(value, BannedSequences):
            _check_sequences(value, rows, vocabulary)
        elif value is not None and len(value) != rows:
            raise ValueError(f"{named} has {len(value)} rows; the batch has {rows}")
    if isinstance(part, RareParameters):
        _check_repeats(part)


def _check_ragged(name: str, ids: RaggedIds, rows: int, vocabulary: int) -> None:
    _check_ids(name, ids.ids, vocabulary)
    _check_starts(name, ids.starts, rows, len(ids.ids))


def _check_masks(masks: TokenMasks, rows: int, vocabulary: int) -> None:
    shape = (len(masks.words), -(-vocabulary // 32))
    if len(masks.rows) != rows or masks.words.shape != shape:
        raise ValueError(
            f"{len(masks.rows)} rows of masks and words {masks.words.shape}; {rows} and "
            f"[any, {shape[1]}] are needed"
        )
    if not -1 <= masks.rows.min(initial=-1) <= masks.rows.max(initial=-1) < len(masks.words):
        raise ValueError(f"rows {masks.rows} name other than {len(masks.words)} masks")


def _check_sequences(banned: BannedSequences, rows: int, vocabulary: int) -> None:
    num_sequences = len(banned.tokens.starts) - 1
    _check_starts("banned_sequences", banned.rows, rows, num_sequences)
    _check_ragged("banned_sequences.tokens", banned.tokens, num_sequences, vocabulary)
    if (np.diff(banned.tokens.starts) < 1).any():
        raise ValueError("a banned sequence has no ids; each needs at least one")


def _check_repeats(rare: RareParameters) -> None:
    for name, array, least in (
        ("dry.allowed_length", None if rare.dry is None else rare.dry.allowed_length, 1),
        ("ngram_size", rare.ngram_size, 0),
    ):
        if array is not None and not ((least <= array) & (array <= MAX_REPEAT)).all():
            raise ValueError(f"{name} must be from {least} to {MAX_REPEAT}: {array}")


def _check_ids(name: str, array: Int32s, vocabulary: int) -> None:
    if len(array) and not 0 <= array.min() <= array.max() < vocabulary:
        raise ValueError(
            f"{name} holds ids from {array.min()} to {array.max()}; the vocabulary has "
            f"{vocabulary} tokens"
        )


def _check_starts(name: str, starts: Int32s, rows: int, size: int) -> None:
    if len(starts) != rows + 1 or starts[0] < 0 or starts[-1] > size:
        raise ValueError(f"{name} must have {rows + 1} starts, offsets into an array of {size}")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"starts of {name} must not fall: {starts}")
