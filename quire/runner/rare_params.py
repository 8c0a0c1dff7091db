"""RareParamsTables: what few requests ask of token choice, by slot; SlotTables' other half.

Invariants: a request without such parameters is never admitted here, and `uses` is set only for
slots of the others; mirostat's mu of a slot is what its request's last token left, 2 tau before its
first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS, Admission
from quire.base.sampling_params import SamplingParams
from quire.sampling.ordered import order_of
from quire.sampling.parts import (
    BannedSequences,
    Dry,
    Mirostat,
    RaggedIds,
    RareParameters,
    RareTruncation,
    ragged,
)

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
# Fields of SamplingParams by their dtypes.
_FLOATS = (
    "typical_p",
    "top_n_sigma",
    "epsilon_cutoff",
    "eta_cutoff",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
)
_COUNTS = ("dry_allowed_length", "dry_penalty_last_n", "no_repeat_ngram_size", "mirostat")
# Of these, filters; xtc_threshold matters only with a probability.
_TRUNCATION = ("typical_p", "top_n_sigma", "epsilon_cutoff", "eta_cutoff", "xtc_probability")
_OFF = SamplingParams()
NO_START = np.zeros(1, np.int32)
NO_START.setflags(write=False)


class RareParamsTables:
    """Arrays [slots], and ids by slot."""

    def __init__(self, num_slots: int) -> None:
        self.uses = np.zeros(num_slots, np.bool_)
        # DRY, n-grams and banned sequences read the tokens so far.
        self.has_history = np.zeros(num_slots, np.bool_)
        self.mirostat_mu = np.zeros(num_slots, np.float32)
        self._has_truncation = np.zeros(num_slots, np.bool_)
        self._floats = {
            name: np.full(num_slots, getattr(_OFF, name), np.float32) for name in _FLOATS
        }
        self._counts = {name: np.full(num_slots, getattr(_OFF, name), np.int32) for name in _COUNTS}
        self._breakers: list[Int32s] = [NO_INTS] * num_slots
        self._sequence_lengths: list[Int32s] = [NO_INTS] * num_slots
        self._sequence_ids: list[Int32s] = [NO_INTS] * num_slots  # one after the other
        self._allowed: list[Int32s] = [NO_INTS] * num_slots
        self._order = np.zeros(num_slots, np.int64)

    def retire(self, slot: int) -> None:
        """Keep nothing of a request that is over."""
        self._set_parameters(slot, _OFF)
        self.uses[slot] = self.has_history[slot] = self._has_truncation[slot] = False
        self.mirostat_mu[slot] = 0.0
        self._order[slot] = 0
        self._breakers[slot] = self._allowed[slot] = NO_INTS
        self._sequence_lengths[slot] = self._sequence_ids[slot] = NO_INTS

    def admit(self, admission: Admission) -> None:
        """Take over what the request asks for."""
        slot, sampling, rules = admission.slot, admission.sampling, admission.rules
        self._set_parameters(slot, sampling)
        begins = admission.mirostat_mu is None
        self.mirostat_mu[slot] = 2 * sampling.mirostat_tau if begins else admission.mirostat_mu
        self._breakers[slot] = np.array(rules.breaker_ids, np.int32)
        lengths = np.array([len(ids) for ids in rules.banned_sequences], np.int32)
        self._sequence_lengths[slot] = lengths
        self._sequence_ids[slot] = np.array(
            [id_ for ids in rules.banned_sequences for id_ in ids], np.int32
        )
        self._has_truncation[slot] = any(
            getattr(sampling, name) != getattr(_OFF, name) for name in _TRUNCATION
        )
        self._allowed[slot] = np.array(sampling.allowed_token_ids or (), np.int32)
        self._order[slot] = order_of(sampling.samplers)
        self.uses[slot] = len(lengths) > 0 or sampling.has_rare_steps
        self.has_history[slot] = (
            sampling.dry_multiplier > 0
            or sampling.no_repeat_ngram_size > 0
            or bool((lengths > 1).any())
        )

    def parameters(self, slots: Index) -> RareParameters:
        """Return the parameters of the rows in `slots`, of which at least one uses some."""
        rows = self.uses[slots].nonzero()[0]
        of_rows = slots[rows]
        ngram_size = self._counts["no_repeat_ngram_size"][slots]
        order = self._order[slots]
        return RareParameters(
            truncation=self._truncation(slots) if self._has_truncation[of_rows].any() else None,
            dry=self._dry(slots, rows),
            mirostat=self._mirostat(slots),
            banned_sequences=self._banned_sequences(slots, rows),
            ngram_size=ngram_size if ngram_size.any() else None,
            allowed=_ids(self._allowed, slots, rows),
            order=order if order.any() else None,
        )

    def _truncation(self, slots: Index) -> RareTruncation:
        floats = self._floats
        return RareTruncation(
            typical_p=floats["typical_p"][slots],
            top_n_sigma=floats["top_n_sigma"][slots],
            epsilon_cutoff=floats["epsilon_cutoff"][slots],
            eta_cutoff=floats["eta_cutoff"][slots],
            xtc_probability=floats["xtc_probability"][slots],
            xtc_threshold=floats["xtc_threshold"][slots],
        )

    def _dry(self, slots: Index, rows: Index) -> Dry | None:
        multiplier = self._floats["dry_multiplier"][slots]
        if not multiplier.any():
            return None
        breakers = [self._breakers[slot] for slot in slots[rows]]
        return Dry(
            multiplier=multiplier,
            base=self._floats["dry_base"][slots],
            allowed_length=self._counts["dry_allowed_length"][slots],
            last_n=self._counts["dry_penalty_last_n"][slots],
            breakers=ragged(breakers, rows, len(slots)),
        )

    def _mirostat(self, slots: Index) -> Mirostat | None:
        mode = self._counts["mirostat"][slots]
        if not mode.any():
            return None
        return Mirostat(
            mode=mode,
            tau=self._floats["mirostat_tau"][slots],
            eta=self._floats["mirostat_eta"][slots],
            mu=self.mirostat_mu[slots],
        )

    def _banned_sequences(self, slots: Index, rows: Index) -> BannedSequences | None:
        lengths = _ids(self._sequence_lengths, slots, rows)
        if lengths is None:
            return None
        ids = np.concatenate([self._sequence_ids[slot] for slot in slots[rows]])
        starts = np.concatenate((NO_START, np.cumsum(lengths.ids, dtype=np.int32)))
        return BannedSequences(rows=lengths.starts, tokens=RaggedIds(starts, ids))

    def _set_parameters(self, slot: int, sampling: SamplingParams) -> None:
        for arrays in (self._floats, self._counts):
            for name, array in arrays.items():
                array[slot] = getattr(sampling, name)


def _ids(of_slots: list[Int32s], slots: Index, rows: Index) -> RaggedIds | None:
    """Return the ids of the slots of `rows`; None if there are none."""
    ids = [of_slots[slot] for slot in slots[rows]]
    return ragged(ids, rows, len(slots)) if any(map(len, ids)) else None
