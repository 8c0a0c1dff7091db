"""The parts of a SampleBatch: groups of parameters that rows use together.

Arrays of R rows, and ragged ones by starts [R + 1] into flat arrays. quire/sampling/batch.py has
their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Words = NDArray[np.uint32]

NO_MASKS: Words = np.empty((0, 0), np.uint32)
NO_MASKS.setflags(write=False)
WHOLE = -2  # as Penalties.last_n


@dataclass(frozen=True, slots=True)
class RaggedIds:
    """Token ids of R rows: row i has ids[starts[i]:starts[i + 1]]."""

    starts: Int32s  # [R + 1]
    ids: Int32s

    def __getitem__(self, row: int) -> Int32s:
        """Return the ids of one row."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def places(self, rows: Index) -> tuple[Int32s, Index]:
        """Return starts of the ids of `rows`, and their indices into `ids`."""
        ranges = [np.arange(self.starts[row], self.starts[row + 1]) for row in rows]
        starts = np.cumsum([0, *map(len, ranges)]).astype(np.int32)
        return starts, np.concatenate([np.empty(0, np.intp), *ranges]).astype(np.intp)

    def take(self, rows: Index) -> RaggedIds:
        """Return the ids of these rows, in this order."""
        starts, places = self.places(rows)
        return RaggedIds(starts, self.ids[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRow:
    """A part of a batch: arrays of R rows, and other parts."""

    def take(self, rows: Index) -> Self:
        """Return the part of these rows, in this order."""
        taken: dict[str, Any] = {}
        for name in (item.name for item in fields(self) if item.init):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                taken[name] = value[rows]
            elif value is not None:
                taken[name] = value.take(rows)
        return type(self)(**taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKeys(PerRow):
    """What the noise of a row depends on, beside the position and the token id."""

    seeds: Int64s  # [R]
    streams: Int32s  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation(PerRow):
    """Filters that most samplers have."""

    top_k: Int32s  # [R] 0 keeps all
    top_p: Float32s  # [R] 1 keeps all
    min_p: Float32s  # [R] 0 keeps all


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties(PerRow):
    """Penalties for tokens of the history.

    last_n: how many of its last tokens count in all three, -1 all. WHOLE: all count in the
    repetition penalty, and those of the output in the others; None: so in every row.
    """

    repetition: Float32s  # [R] 1 is off
    presence: Float32s  # [R] 0 is off
    frequency: Float32s  # [R] 0 is off
    last_n: Int32s | None = None  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory(PerRow):
    """The known tokens of requests, prompt first, for penalties, DRY, n-grams and banned sequences.

    tokens: empty for a row that reads none. late_slots: for a row that lacks its last token, which
    only the device has, the slot that chose it; -1 for other rows, None if no row is one.
    """

    tokens: RaggedIds
    num_prompt_tokens: Int32s  # [R]
    late_slots: Int32s | None = None  # [R]

    def completed(self, last: Int32s) -> TokenHistory:
        """Return a history that lacks nothing. last: the last token of each slot, -1 where the row
        failed, which adds nothing."""
        if self.late_slots is None:
            return self
        tokens = np.where(self.late_slots >= 0, last[self.late_slots], -1).astype(np.int32)
        grows = tokens >= 0
        starts, ids = self.tokens.starts, self.tokens.ids
        ids = np.insert(ids, starts[1:][grows], tokens[grows])
        starts = starts.copy()
        starts[1:] += np.cumsum(grows, dtype=np.int32)
        return replace(self, tokens=RaggedIds(starts, ids), late_slots=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """tokens: the biased ids; values: what is added to their logits, in the same order."""

    tokens: RaggedIds
    values: Float32s

    def take(self, rows: Index) -> LogitBias:
        """Return the bias of these rows, in this order."""
        starts, places = self.tokens.places(rows)
        return LogitBias(
            tokens=RaggedIds(starts, self.tokens.ids[places]), values=self.values[places]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Masks of allowed tokens. rows: which of `words` a row has, -1 none. Bit i % 32 of word
    i // 32 allows id i."""

    rows: Int32s  # [R]
    words: Words  # [M, ceil(V / 32)]

    def take(self, rows: Index) -> TokenMasks:
        """Return the masks of these rows, in this order."""
        return TokenMasks(rows=self.rows[rows], words=self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class RareTruncation(PerRow):
    """Filters that few samplers have."""

    typical_p: Float32s  # [R] 1 keeps all
    top_n_sigma: Float32s  # [R] 0 keeps all
    epsilon_cutoff: Float32s  # [R]
    eta_cutoff: Float32s  # [R]
    xtc_probability: Float32s  # [R]
    xtc_threshold: Float32s  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry(PerRow):
    """DRY. last_n: how many tokens of the history it looks at; -1 all. breakers: ids across which
    it sees no repeat."""

    multiplier: Float32s  # [R] 0 is off
    base: Float32s  # [R]
    allowed_length: Int32s  # [R] 1 to 50
    last_n: Int32s  # [R]
    breakers: RaggedIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirostat(PerRow):
    """Mirostat. mode is 0, 1 or 2; mu is the row's last TokenChoice.mus, or 2 tau at first."""

    mode: Int32s  # [R] 0 is off
    tau: Float32s  # [R]
    eta: Float32s  # [R]
    mu: Float32s  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class BannedSequences:
    """Sequences of at least one id. Row i has sequences rows[i] to rows[i + 1] of `tokens`."""

    rows: Int32s  # [R + 1]
    tokens: RaggedIds  # of the sequences

    def take(self, rows: Index) -> BannedSequences:
        """Return the sequences of these rows, in this order."""
        starts, sequences = RaggedIds(self.rows, self.rows[:0]).places(rows)
        return BannedSequences(rows=starts, tokens=self.tokens.take(sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class RareParameters(PerRow):
    """Parameters that few requests use. allowed: no ids for a row that may choose any. order:
    the row's own order of steps (sampling/ordered.py), 0 for that of sampling/batch.py."""

    truncation: RareTruncation | None = None
    dry: Dry | None = None
    mirostat: Mirostat | None = None
    banned_sequences: BannedSequences | None = None
    ngram_size: Int32s | None = None  # [R] no_repeat_ngram_size: 0 is off; to 50
    allowed: RaggedIds | None = None
    order: Int64s | None = None  # [R]


def ragged(parts: list[Int32s], rows: Index, num_rows: int) -> RaggedIds:
    """Return parts[i] as the ids of row rows[i], in rising order; other rows have none.

    The cost depends on the number of parts only.
    """
    starts = np.zeros(num_rows + 1, np.int32)
    if not parts:
        return RaggedIds(starts, np.empty(0, np.int32))
    lengths = np.zeros(num_rows, np.int32)
    lengths[rows] = [len(part) for part in parts]
    np.cumsum(lengths, out=starts[1:])
    return RaggedIds(starts, np.ascontiguousarray(np.concatenate(parts), np.int32))
