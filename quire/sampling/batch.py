"""SampleBatch: what token choice needs to know about each row; TokenChoice: what it yields.

Rows need not share parameters. The semantics, in this order, for a row with raw logits l [V];
steps marked * are in RareParameters (definitions: sampling/rare.py):

1. log-probabilities (where asked for) are of l itself: l - logsumexp(l), the sum exact in any
   order (sampling/noise.py).
2. l[id] += bias for each logit_bias entry.
3. repetition penalty r over the distinct tokens of prompt and output: l > 0 ? l / r : l * r.
   then for tokens of the output: l -= frequency * count + presence.
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
   * With mirostat the filters are one: drop tokens of more than mu bits of surprise.
   Then the largest of l + gumbel(seed, stream, position, id) over what is kept, ties to the
   lowest id. * Mirostat then moves mu: mu -= eta * (surprise of the token - tau).

vLLM has this order as far as it has the steps; transformers has top_k, top_p, min_p, typical_p.
llama.cpp divides by the temperature last, after XTC, so that its filters see temperature 1, and
with mirostat it has no penalties, DRY or bans.

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
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Candidates

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Words = NDArray[np.uint32]

NO_MASKS: Words = np.empty((0, 0), np.uint32)
NO_MASKS.setflags(write=False)


def _ints() -> Int32s:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RareParameters:
    """What few rows ask for, of all R rows of a batch; rows without have the value that is off.

    dry_last_n: how many tokens of the history DRY looks at; -1 all. breakers: ids it sees no
    repeat across. sequences: ids of banned sequences one after the other, each of at least one
    id; row i has those from sequence_rows[i] to sequence_rows[i + 1], sequence j the ids from
    sequence_starts[j] on. allowed: none for a row that may choose any. mirostat is 0 or 2, mu what
    the row's last TokenChoice.mus said, or 2 tau at first.
    """

    typical_p: Float32s  # [R] 1 keeps all
    top_n_sigma: Float32s  # [R] 0 keeps all
    epsilon_cutoff: Float32s  # [R]
    eta_cutoff: Float32s  # [R]
    xtc_probability: Float32s  # [R]
    xtc_threshold: Float32s  # [R]
    dry_multiplier: Float32s  # [R] 0 is off
    dry_base: Float32s  # [R]
    dry_allowed_length: Int32s  # [R] 1 to 50
    dry_last_n: Int32s  # [R]
    ngram_size: Int32s  # [R] 0 is off; to 50
    mirostat: Int32s  # [R]
    mirostat_tau: Float32s  # [R]
    mirostat_eta: Float32s  # [R]
    mirostat_mu: Float32s  # [R]
    breaker_starts: Int32s  # [R + 1]
    breaker_ids: Int32s = field(default_factory=_ints)
    sequence_rows: Int32s  # [R + 1]
    sequence_starts: Int32s  # [number of sequences + 1]
    sequence_ids: Int32s = field(default_factory=_ints)
    allowed_starts: Int32s  # [R + 1]
    allowed_ids: Int32s = field(default_factory=_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Parameters of R rows; ragged parts are given by starts [R + 1] into flat arrays.

    positions: absolute position the chosen token will have (the noise depends on it).
    history: all known tokens of the row's request, prompt first (read only where the row has a
    penalty, DRY, banned sequences or n-grams; may be empty otherwise); num_prompt_tokens of them
    are the prompt.
    late_slots: of rows with a history that lacks its last token, which only the device has, the
    slot that chose it; -1 of other rows, empty where no row is one. `completed` adds them.
    num_logprobs: -1 none, else the alternatives wanted (0 to 20).
    banned: ids that may not be chosen now (stop ids while min_tokens is not reached).
    rare: None where no row asks for any of it.
    num_candidates: what a beam's row may go on with, 0 for other rows; empty where no row is one.
    mask_rows: which of `masks` a row has, -1 none; empty where no row has any. Bit i % 32 of word
    i // 32 allows id i.
    prepared: what an implementation has made of all but the positions, by its own key; batches that
    differ in nothing else share it.
    """

    temperature: Float32s  # [R]
    top_k: Int32s  # [R] 0 keeps all
    top_p: Float32s  # [R]
    min_p: Float32s  # [R]
    repetition_penalty: Float32s  # [R]
    presence_penalty: Float32s  # [R]
    frequency_penalty: Float32s  # [R]
    seeds: Int64s  # [R]
    streams: Int32s  # [R]
    positions: Int32s  # [R]
    num_prompt_tokens: Int32s  # [R]
    num_logprobs: Int32s  # [R]
    history_starts: Int32s  # [R + 1]
    history: Int32s = field(default_factory=_ints)
    late_slots: Int32s = field(default_factory=_ints)  # [R] or empty
    bias_starts: Int32s  # [R + 1]
    bias_ids: Int32s = field(default_factory=_ints)
    bias_values: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    banned_starts: Int32s  # [R + 1]
    banned_ids: Int32s = field(default_factory=_ints)
    rare: RareParameters | None = None
    num_candidates: Int32s = field(default_factory=_ints)  # [R] or empty
    mask_rows: Int32s = field(default_factory=_ints)  # [R] or empty
    masks: Words = field(default_factory=lambda: NO_MASKS)  # [M, ceil(V / 32)]
    prepared: dict[Hashable, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def at(self, positions: Int32s) -> SampleBatch:
        """The same of later tokens. (dataclasses.replace takes ten times as long.)"""
        batch = object.__new__(SampleBatch)
        for name in SampleBatch.__slots__:
            object.__setattr__(batch, name, getattr(self, name))
        object.__setattr__(batch, "positions", positions)
        return batch

    def completed(self, last: Int32s) -> SampleBatch:
        """The same with nothing late, where the last token of each slot is known: last [slots], -1
        where the row failed, which adds nothing."""
        if not len(self.late_slots):
            return self
        tokens = np.where(self.late_slots >= 0, last[self.late_slots], -1).astype(np.int32)
        grows = tokens >= 0
        starts = self.history_starts.copy()
        starts[1:] += np.cumsum(grows, dtype=np.int32)
        history = np.insert(self.history, self.history_starts[1:][grows], tokens[grows])
        return replace(self, history=history, history_starts=starts, late_slots=_ints())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """token_ids [R], -1 where the row failed; logprobs [R] of the chosen (NaN: not asked for);
    top_ids, top_logprobs [R, K], best first (ties: lower id first), -1 and NaN where unused;
    mus [R]: mirostat's mu from now on, 0 for rows without it; empty where no row has it.
    candidates [R, C]: of rows of beams; None where no row is one."""

    token_ids: Int32s
    logprobs: Float32s
    top_ids: Int32s
    top_logprobs: Float32s
    mus: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    candidates: Candidates | None = None


def ragged(parts: list[Int32s], rows: NDArray[np.intp], num_rows: int) -> tuple[Int32s, Int32s]:
    """Return starts [num_rows + 1] and the concatenated values of a ragged array.

    parts[i] belongs to row rows[i], in rising order; all other rows are empty. The cost depends on
    the number of parts only.
    """
    starts = np.zeros(num_rows + 1, np.int32)
    if not parts:
        return starts, np.empty(0, np.int32)
    lengths = np.zeros(num_rows, np.int32)
    lengths[rows] = [len(part) for part in parts]
    np.cumsum(lengths, out=starts[1:])
    return starts, np.ascontiguousarray(np.concatenate(parts), np.int32)
