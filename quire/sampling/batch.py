"""SampleBatch: the sampling parameters of the rows of a step; TokenChoice: the tokens chosen.

Every implementation checks a batch here before it reads an array.

A batch is composed of parts, one for each group of parameters. A part is None if no row uses it,
and neither the host nor a kernel pays for it then; within a part, a row that does not use it has
the values that are off. The semantics, in this order, for a row with raw logits l [V]; steps marked
* are in RareParameters (definitions: sampling/rare.py):

1. log-probabilities (where asked for) are of l itself: l - logsumexp(l), the sum exact in any
   order (sampling/noise.py).
2. l[id] += bias for each logit_bias entry.
3. repetition penalty r over the distinct tokens of prompt and output: l > 0 ? l / r : l * r.
   then for tokens of the output (or as Penalties.last_n says): l -= frequency * count + presence.
   * then DRY: l -= multiplier * base^(n - allowed_length) for tokens that would go on a repeat
   of n >= allowed_length tokens.
4. l[id] = -inf for banned ids (stop ids while fewer than min_tokens were generated), * for the
   last ids of banned sequences where the history ends with the others, * for tokens that would
   complete an n-gram the history has, * for all but the allowed ids, where some are given, and
   for what the row's mask does not allow.
5. temperature 0: the largest l, ties to the lowest id. Else l /= temperature, and the filters,
   each over what those before it left:
   * top_n_sigma: drop l < max - n * sigma, sigma over all finite l;
   min_p: drop l < max + log(min_p); top_k: keep the k largest (ties: lower ids first);
   * typical_p: by |surprise - entropy|, smallest first, keep until typical_p of the mass is
   reached, and ties; top_p: over what is left, sorted by (probability down, id up), keep the
   shortest prefix with a probability of at least top_p of the remaining mass;
   * epsilon_cutoff and eta_cutoff: drop what is less probable, but never the most probable;
   * XTC: by the row's coin, drop all tokens of at least xtc_threshold but the last of them.
   * With mirostat the filters are one: drop tokens of more than mu bits of surprise (version 2).
   Then the largest of l + gumbel(seed, stream, position, id) over what is kept, ties to the
   lowest id. * Mirostat then moves mu: mu -= eta * (surprise of the token - tau).

vLLM has this order as far as it has the steps; transformers has top_k, top_p, min_p, typical_p.
A row may have another order of the steps after 4 (sampling/ordered.py), such as that of llama.cpp,
which divides by the temperature last. llama.cpp has no penalties, DRY or bans with mirostat.

6. A row of a beam (num_candidates above 0) has steps 2 to 4 done on its log-probabilities in place
   of its logits, as transformers' beam search does it, and nothing chosen or filtered: the best
   num_candidates of what is left above -inf, ties to the lower id, are returned with their values
   after step 4 and after step 1. There may be fewer, or none. Its token says nothing.

A row with NaN or +inf, in its logits or after step 4 or the temperature, or with nothing left to
choose (of a beam: with no finite logit), is a row error, never a wrong token. Temperatures below
2^-40 count as 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_FLOATS, Candidates
from quire.sampling.noise import MAX_VOCAB
from quire.sampling.parts import (
    BannedSequences,
    Float32s,
    Int32s,
    LogitBias,
    NoiseKeys,
    Penalties,
    PerRow,
    RaggedIds,
    RareParameters,
    TokenHistory,
    TokenMasks,
    Truncation,
)
from quire.sampling.rare import MAX_REPEAT

NO_TABLE_IDS: Int32s = np.empty((0, 0), np.int32)
NO_TABLE: Float32s = np.empty((0, 0), np.float32)


@dataclass(frozen=True, kw_only=True)  # without slots: `at` copies all attributes at once
class SampleBatch(PerRow):
    """Parameters of R rows.

    positions: absolute position the chosen token will have (the noise depends on it).
    banned: ids that may not be chosen now (stop ids while min_tokens is not reached).
    num_logprobs: -1 none, else the number of alternatives (0 to 20).
    num_candidates: of a beam, how many continuations it may have; 0 for other rows.
    prepared: what an implementation has made of all but the positions, by its own key; batches that
    differ in nothing else share it.
    """

    positions: Int32s  # [R]
    temperature: Float32s  # [R]
    noise: NoiseKeys
    truncation: Truncation | None = None
    penalties: Penalties | None = None
    history: TokenHistory | None = None
    logit_bias: LogitBias | None = None
    banned: RaggedIds | None = None
    masks: TokenMasks | None = None
    rare: RareParameters | None = None
    num_logprobs: Int32s | None = None  # [R]
    num_candidates: Int32s | None = None  # [R]
    prepared: dict[Hashable, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def at(self, positions: Int32s) -> SampleBatch:
        """Return the same parameters for tokens at other positions."""
        batch = object.__new__(SampleBatch)
        batch.__dict__.update(self.__dict__, positions=positions)
        return batch

    @property
    def has_late_tokens(self) -> bool:
        """Whether a row's history lacks its last token."""
        late_slots = None if self.history is None else self.history.late_slots
        return late_slots is not None and bool((late_slots >= 0).any())

    def completed(self, last: Int32s) -> SampleBatch:
        """Return the batch with complete histories. last: see TokenHistory.completed."""
        if self.history is None or self.history.late_slots is None:
            return self
        return replace(self, history=self.history.completed(last))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """token_ids [R], -1 where the row failed; logprobs [R] of the chosen (NaN: not asked for);
    top_ids, top_logprobs [R, K], best first (ties: lower id first), -1 and NaN where unused. These
    three are empty, [0] and [0, 0], if the batch has no num_logprobs.
    mus [R]: mirostat's mu from now on, 0 for rows without it; empty where no row has it.
    candidates [R, C]: of rows of beams; None where no row is one."""

    token_ids: Int32s
    logprobs: Float32s = field(default_factory=lambda: NO_FLOATS)
    top_ids: Int32s = field(default_factory=lambda: NO_TABLE_IDS)
    top_logprobs: Float32s = field(default_factory=lambda: NO_TABLE)
    mus: Float32s = field(default_factory=lambda: NO_FLOATS)
    candidates: Candidates | None = None


def max_top(num_logprobs: Int32s) -> int:
    """Return the largest number of alternatives of a row."""
    return max(0, int(num_logprobs.max(initial=-1)))


def has_mirostat(batch: SampleBatch) -> bool:
    """Return whether a row uses mirostat."""
    mirostat = None if batch.rare is None else batch.rare.mirostat
    return mirostat is not None and bool(mirostat.mode.any())


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
    for name in names_of(type(part)):  # type: ignore[arg-type]
        value = getattr(part, name)
        if value is None:
            continue
        if isinstance(value, np.ndarray):
            if len(value) != rows:
                raise ValueError(f"{prefix}{name} has {len(value)} rows; the batch has {rows}")
        elif isinstance(value, PerRow):
            _check_part(f"{prefix}{name}.", value, rows, vocabulary)
        elif isinstance(value, RaggedIds):
            _check_ragged(prefix + name, value, rows, vocabulary)
        elif isinstance(value, LogitBias):
            ids, values = len(value.tokens.ids), len(value.values)
            _check_ragged(prefix + name, value.tokens, rows, vocabulary)
            if values != ids:
                raise ValueError(f"{prefix}{name} has {values} values for {ids} ids")
        elif isinstance(value, TokenMasks):
            _check_masks(value, rows, vocabulary)
        elif isinstance(value, BannedSequences):
            _check_sequences(value, rows, vocabulary)
    if isinstance(part, RareParameters):
        _check_repeats(part)


@lru_cache
def names_of(part: type[Any]) -> tuple[str, ...]:
    """Return the names of what a part is composed of."""
    return tuple(item.name for item in fields(part) if item.init)


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
    if (starts[1:] < starts[:-1]).any():
        raise ValueError(f"starts of {name} must not fall: {starts}")
