"""Control: how many drafts a request gets in a step.

A draft is worth verifying if the tokens expected from it cost less than tokens cost without it:
if P / draft_ms exceeds step_tokens / step_ms, where P is the probability that the draft and all
before it are accepted (counts: DraftCounts), and draft_ms includes the time to compute it where a
draft model does. What drafts cost whatever their number, by step and by row, must be gained
besides. Where drafts lost time lately, as it was measured, none are made for a while. A function of
counts and times that are given: no clock. Always holds: no choice changes an answer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire._native import DraftCounts, draft_lengths
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.plain_counts import FADE, MAX_TRIALS
from quire.speculative.rests import DraftRests

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

# From so many drafts on, tried lately, their acceptance is known.
INFORMED_TRIALS = 16.0
# A draft must promise this much more than it costs.
MARGIN = 1.1


class Passes(NamedTuple):
    """Passes of a draft model: each drafts a token for some requests, so these share its time.

    ms: of a pass for 0, 1, ... requests, up to all of `rows`. rows: requests that are drafted so.
    """

    ms: Float64s
    rows: NDArray[np.bool_]


class StepCost(NamedTuple):
    """Predicted milliseconds of a step without drafts, the tokens it yields, and what one draft
    adds to the step, by request. passes: what making the drafts takes besides; None: nothing.
    num_steps: steps since the control was asked last. once_ms, row_ms: what a step with drafts
    takes longer however many they are, and each of its rows with drafts."""

    step_ms: float
    step_tokens: int
    draft_ms: Float64s
    passes: Passes | None = None
    num_steps: int = 1
    once_ms: float = 0.0
    row_ms: float = 0.0

    def with_passes(self) -> Float64s:
        """Return what one draft adds, its share of a pass for all requests included."""
        if self.passes is None:
            return self.draft_ms
        ms, rows = self.passes
        num = int(np.add.reduce(rows))
        share_ms: Float64s = rows * (ms[num] / max(num, 1))
        return self.draft_ms + share_ms


class Control(Protocol):
    """Chooses lengths of drafts, by slot.

    balance: what they gained; None: it does not matter. rests: steps in which it is not asked.
    is_informed: enough drafts were tried lately to know how many are accepted.
    """

    balance: DraftBalance | None
    rests: DraftRests

    @property
    def is_informed(self) -> bool: ...

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Note that another request runs in `slot`; predicts: it brings a prediction."""

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """Return how many drafts each of `slots` should get, at most limits[i].

        cost: None where it is not known: about as in the last step.
        """

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Note that of drafted[i] drafts the first accepted[i] were right."""


class FixedControl:
    """Always as many drafts as allowed, at most `num_drafts`."""

    balance: DraftBalance | None = None
    is_informed = True

    def __init__(self, num_drafts: int) -> None:
        self.rests = DraftRests()
        self._num_drafts = np.int32(num_drafts)

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Do nothing."""

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        return np.minimum(limits, self._num_drafts)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Do nothing."""


class AdaptiveControl:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._counts = DraftCounts(num_slots, max_drafts)
        self._last_cost: StepCost | None = None
        self._num_tried = 0.0  # drafts of all requests that fade as the counts do
        self.balance: DraftBalance | None = DraftBalance()
        self.rests = DraftRests()

    @property
    def is_informed(self) -> bool:
        """See Control."""
        return self._num_tried >= INFORMED_TRIALS

    def begin(self, slot: int, *, predicts: bool) -> None:
        """See Control."""
        self._counts.begin(slot, predicts)

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        if cost is not None:
            self._last_cost = cost
        elif self._last_cost is None:
            return limits
        else:
            draft_ms = float(np.mean(self._last_cost.with_passes()))
            cost = self._last_cost._replace(
                draft_ms=np.full(len(slots), draft_ms), passes=None, num_steps=0
            )
        self._num_tried *= FADE**cost.num_steps
        chances = np.empty((len(slots), self._max_drafts))
        self._counts.chances(slots, cost.num_steps, chances)
        return best_lengths(chances, limits, cost)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See Control."""
        self._num_tried = min(self._num_tried + len(slots), MAX_TRIALS)
        self._counts.verified(slots, drafted, accepted)


def best_lengths(chances: Float64s, limits: Int32s, cost: StepCost) -> Int32s:
    """Return the lengths of drafts [B] that yield most tokens per millisecond.

    chances [B, K]: the probability that a draft and all before it are accepted; falls along a row.
    """
    lengths, draft_ms = np.empty(len(limits), np.int32), cost.with_passes()
    times = (cost.step_ms, cost.step_tokens, cost.once_ms, cost.row_ms, MARGIN)
    draft_lengths(chances, limits, draft_ms, *times, lengths)
    if cost.passes is None or not np.logical_or.reduce(lengths):
        return lengths
    rate = cost.step_tokens / max(cost.step_ms, 1e-9)
    return _without_poor_passes(lengths, chances, cost, rate)


def _without_poor_passes(lengths: Int32s, chances: Float64s, cost: StepCost, rate: float) -> Int32s:
    """Return `lengths` without the last passes that too few requests share to pay for them."""
    assert cost.passes is not None, "drafts are computed"
    ms, rows = cost.passes
    for place in range(int(lengths[rows].max(initial=0)) - 1, -1, -1):
        drafted = rows & (lengths > place)
        pass_ms = ms[np.count_nonzero(drafted)] + float(np.add.reduce(cost.draft_ms[drafted]))
        if float(np.add.reduce(chances[drafted, place])) > MARGIN * rate * pass_ms:
            break
        lengths[drafted] = place
    return lengths
