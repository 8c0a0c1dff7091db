"""Draft tokens of a simulation: right with given probabilities, by position in the draft.

The scheduler's draft rows, the control and its learned prices are those of the server; only the
proposer is made up. It knows the planned answers. Whether a draft is right follows from the request
and the position by a hash, so that nothing is drawn and a run can be repeated. Always holds: a
simulation without drafts has no object of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.base.errors import SettingError
from quire.base.records import Request
from quire.base.report import Field
from quire.base.token_table import TokenTable
from quire.base.wire import WireError
from quire.engine.record import read_records
from quire.sim.runner import STOP_ID, PlannedOutput
from quire.speculative.control import AdaptiveControl
from quire.speculative.drafter import Drafter
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import Drafts, Proposer

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
# Token ids of a simulation stand for content; no vocabulary bounds them.
NUM_IDS = 2**31 - 1
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """rates: the probability that the first, second, ... draft of a row is accepted if all before
    it are; the last one holds for all further ones. max_drafts: most drafts of a row, at least 1.
    """

    rates: tuple[float, ...]
    max_drafts: int

    def __post_init__(self) -> None:
        wrong = [rate for rate in self.rates if not 0.0 <= rate <= 1.0]
        if wrong or not self.rates:
            raise SettingError(
                f"the acceptance of drafts is {', '.join(map(str, self.rates)) or 'empty'}; give "
                "probabilities from 0 to 1 by position in the draft, as in 0.8,0.7,0.6"
            )
        if self.max_drafts < 1:
            raise SettingError(
                f"max_draft_tokens is {self.max_drafts} and an acceptance of drafts is given; "
                "it must be at least 1, or leave the acceptance out"
            )


def draft_acceptance(text: str, max_drafts: int) -> DraftAcceptance:
    """Return the acceptance that `text` gives: probabilities, or the file of a plan recording.

    Raises SettingError.
    """
    words = [word.strip() for word in text.split(",")]
    try:
        return DraftAcceptance(tuple(float(word) for word in words), max_drafts)
    except ValueError:
        pass
    path = Path(text)
    if not path.is_file():
        raise SettingError(
            f"{text!r} is neither probabilities, as in 0.8,0.7,0.6, nor a file of --record-plans"
        )
    return DraftAcceptance(recorded_rates(path), max_drafts)


def recorded_rates(path: Path) -> tuple[float, ...]:
    """Return the acceptance by position of the steps in a plan recording (--record-plans).

    Raises SettingError where it has no drafts or cannot be read.
    """
    tried, accepted = np.zeros(0), np.zeros(0)
    try:
        for step in read_records(path):
            plan, result = step.plan, step.result
            if result is None or not plan.draft_ids.size:
                continue
            good = np.zeros(len(plan.slots), np.int32)
            drafts = (plan.draft_counts, plan.draft_ids)
            _native.count_accepted(*drafts, result.token_counts, result.token_ids, good)
            num = np.minimum(good + 1, plan.draft_counts)  # after accepted ones
            width = max(int(num.max()), len(tried))
            tried, accepted = (np.pad(one, (0, width - len(one))) for one in (tried, accepted))
            columns = np.arange(width)
            tried += np.count_nonzero(columns < num[:, None], axis=0)
            accepted += np.count_nonzero(columns < good[:, None], axis=0)
    except (OSError, ValueError, WireError) as error:
        raise SettingError(f"{path} is no recording of plans: {error}") from error
    if not len(tried):
        raise SettingError(
            f"{path} has no step with drafts; record plans of a server with --speculate, or give "
            "probabilities"
        )
    return tuple((accepted / tried).tolist())


class PlannedDrafts(Proposer):
    """Knows the planned answers, by request id."""

    name = "planned"

    def __init__(
        self, planned: Mapping[str, PlannedOutput], rates: tuple[float, ...], num_slots: int
    ) -> None:
        self._planned, self._rates = planned, rates
        self._live: list[PlannedOutput | None] = [None] * num_slots

    def begin(self, slot: int, request: Request) -> None:
        """See Proposer."""
        self._live[slot] = self._planned[request.request_id]

    def end(self, slot: int) -> None:
        """See Proposer."""
        self._live[slot] = None

    def propose(self, tokens: TokenTable, slots: Index, limits: Int32s, drafts: Drafts) -> None:
        """See Proposer."""
        for row, (slot, limit) in enumerate(zip(slots.tolist(), limits.tolist(), strict=True)):
            planned, known = self._live[slot], int(tokens.lengths[slot])
            if planned is None:
                continue
            num = min(limit, planned.total_tokens - known)
            for place in range(num):
                position = known + place
                is_last = position >= planned.total_tokens - 1
                right, wrong = planned.token_id, planned.token_id + 1
                if is_last:
                    right, wrong = STOP_ID, planned.token_id
                rate = self._rates[min(place, len(self._rates) - 1)]
                accepts = _uniform(planned.token_id, position) < rate
                drafts.ids[row, place] = right if accepts else wrong
            drafts.counts[row] = num


def planned_source(
    acceptance: DraftAcceptance, planned: Mapping[str, PlannedOutput], *, num_slots: int
) -> Drafter:
    """Return the draft source of a simulation."""
    return Drafter(
        PlannedDrafts(planned, acceptance.rates, num_slots),
        PredictionProposer(num_slots),
        AdaptiveControl(num_slots, acceptance.max_drafts),
        num_slots=num_slots,
        max_drafts=acceptance.max_drafts,
        vocab_size=NUM_IDS,
        report=_raise,
    )


def _raise(what: str, **fields: Field) -> None:
    raise AssertionError(f"{what}: {fields}")


def _uniform(content: int, position: int) -> float:
    """Return a number in [0, 1) that depends on both as if it were drawn (splitmix64)."""
    mixed = (content * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 1) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ mixed >> 31) >> 11) / 2**53
