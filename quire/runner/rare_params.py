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
from quire.sampling.batch import RareParameters, ragged

Int32s = NDArray[np.int32]
# Fields of SamplingParams by their dtypes; some have shorter names in RareParameters.
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
        self._floats = {
            name: np.full(num_slots, getattr(_OFF, name), np.float32) for name in _FLOATS
        }
        self._counts = {name: np.full(num_slots, getattr(_OFF, name), np.int32) for name in _COUNTS}
        self._breakers: list[Int32s] = [NO_INTS] * num_slots
        self._sequence_lengths: list[Int32s] = [NO_INTS] * num_slots
        self._sequence_ids: list[Int32s] = [NO_INTS] * num_slots  # one after the other
        self._allowed: list[Int32s] = [NO_INTS] * num_slots

    def retire(self, slot: int) -> None:
        """Keep nothing of a request that is over."""
        self._settle(slot, _OFF)
        self.uses[slot] = self.has_history[slot] = False
        self.mirostat_mu[slot] = 0.0
        self._breakers[slot] = self._allowed[slot] = NO_INTS
        self._sequence_lengths[slot] = self._sequence_ids[slot] = NO_INTS

    def admit(self, admission: Admission) -> None:
        """Take over what the request asks for."""
        slot, sampling, rules = admission.slot, admission.sampling, admission.rules
        self._settle(slot, sampling)
        begins = admission.mirostat_mu is None
        self.mirostat_mu[slot] = 2 * sampling.mirostat_tau if begins else admission.mirostat_mu
        self._breakers[slot] = np.array(rules.breaker_ids, np.int32)
        lengths = np.array([len(ids) for ids in rules.banned_sequences], np.int32)
        self._sequence_lengths[slot] = lengths
        self._sequence_ids[slot] = np.array(
            [id_ for ids in rules.banned_sequences for id_ in ids], np.int32
        )
        self._allowed[slot] = np.array(sampling.allowed_token_ids or (), np.int32)
        self.uses[slot] = len(lengths) > 0 or sampling.has_rare_steps
        self.has_history[slot] = (
            sampling.dry_multiplier > 0
            or sampling.no_repeat_ngram_size > 0
            or bool((lengths > 1).any())
        )

    def parameters(self, slots: Int32s | NDArray[np.intp]) -> RareParameters | None:
        """Return the parameters of the rows in `slots`; None if no row uses any."""
        rows = self.uses[slots].nonzero()[0]
        if not len(rows):
            return None
        floats, counts, num_rows = self._floats, self._counts, len(slots)

        def ids(of_slots: list[Int32s]) -> tuple[Int32s, Int32s]:
            return ragged([of_slots[slot] for slot in slots[rows]], rows, num_rows)

        breaker_starts, breaker_ids = ids(self._breakers)
        allowed_starts, allowed_ids = ids(self._allowed)
        sequence_rows, lengths = ids(self._sequence_lengths)
        _, sequence_ids = ids(self._sequence_ids)
        return RareParameters(
            typical_p=floats["typical_p"][slots],
            top_n_sigma=floats["top_n_sigma"][slots],
            epsilon_cutoff=floats["epsilon_cutoff"][slots],
            eta_cutoff=floats["eta_cutoff"][slots],
            xtc_probability=floats["xtc_probability"][slots],
            xtc_threshold=floats["xtc_threshold"][slots],
            dry_multiplier=floats["dry_multiplier"][slots],
            dry_base=floats["dry_base"][slots],
            dry_allowed_length=counts["dry_allowed_length"][slots],
            dry_last_n=counts["dry_penalty_last_n"][slots],
            ngram_size=counts["no_repeat_ngram_size"][slots],
            mirostat=counts["mirostat"][slots],
            mirostat_tau=floats["mirostat_tau"][slots],
            mirostat_eta=floats["mirostat_eta"][slots],
            mirostat_mu=self.mirostat_mu[slots],
            breaker_starts=breaker_starts,
            breaker_ids=breaker_ids,
            sequence_rows=sequence_rows,
            sequence_starts=np.concatenate((NO_START, np.cumsum(lengths, dtype=np.int32))),
            sequence_ids=sequence_ids,
            allowed_starts=allowed_starts,
            allowed_ids=allowed_ids,
        )

    def _settle(self, slot: int, sampling: SamplingParams) -> None:
        for arrays in (self._floats, self._counts):
            for name, array in arrays.items():
                array[slot] = getattr(sampling, name)
