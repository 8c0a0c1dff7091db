"""DraftAccount: when drafts of one origin are asked for: of the engine's proposer, or of the texts
that requests predict.

Each origin has rests and a balance of its own, so that drafts that do not pay rest beside others
that do. Knows no clock. Always holds: while an account rests or is in debt, nothing of it is asked
for, whatever the other does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.proposer import LookupProposer, Proposer
from quire.speculative.rests import DraftRests

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
# Steps of a rest of which the end is not known: until those without drafts have earned a trial.
UNTIL_EARNED = 1 << 30


class DraftAccount:
    """Of `proposer`, which is asked for the slots in `asks`. balance: what its drafts gained; None:
    it does not matter."""

    def __init__(
        self, proposer: Proposer, asks: Bools, rests: DraftRests, balance: DraftBalance | None
    ) -> None:
        self.rests, self.balance = rests, balance
        self._lookup = proposer if isinstance(proposer, LookupProposer) else None
        self._asks = asks
        self._num_new = 0  # requests that began since what is known was doubted

    @property
    def is_in_debt(self) -> bool:
        """Return whether its drafts have lost so much time that none are asked for."""
        return self.balance is not None and not self.balance.allows_drafts

    @property
    def rest_steps(self) -> int:
        """Return in how many further steps nothing is asked for."""
        if self.is_in_debt:
            return UNTIL_EARNED
        return self.rests.quiet if self.rests.looks else self.rests.left

    def rested(self, num_steps: int) -> None:
        """Note that so many steps have passed for which `skips_step` was not asked."""
        rests = self.rests
        rests.left = rests.left - num_steps if rests.left > num_steps else 0
        rests.until_look -= num_steps

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        """See DraftSource. What was found is doubted once as many began as run: beside many, one
        changes little."""
        if num_running == 1:
            self.rests.end_early()
        self._num_new += num_new
        if self._num_new < num_running:
            return
        self._num_new = 0
        self.rests.forget_misses()
        if self.balance is not None:
            self.balance.reconsider()

    def skips_step(
        self, tokens: TokenTable, able_slots: Callable[[], Index], step_ms: float
    ) -> bool:
        """Return whether nothing is asked for in this step, which takes about `step_ms`; called
        once a step, see DraftSource."""
        rests, balance = self.rests, self.balance
        if rests.left and (not rests.looks or rests.until_look > 0):
            rests.left -= 1
            rests.until_look -= 1
            return True
        if balance is not None and not balance.allows_drafts:  # as is_in_debt: a call less
            rests.left -= rests.left > 0
            rests.until_look -= 1
            return True
        lookup = self._lookup
        if lookup is None:
            return False
        try:
            if rests.left:
                finds = lookup.finds_long(tokens, None)
                # Which slots can have drafts takes longer than to look at all.
                finds = finds and self._finds_long(lookup, tokens, able_slots())
                rests.note_look(finds=finds)
                return not finds
            if not lookup.may_find(tokens):
                rests.note_miss(step_ms)
                return True
        except Exception:  # noqa: BLE001  `propose` finds out for which request
            return False
        return False

    def is_open(self, tokens: TokenTable, slots: Index) -> bool:
        """Return whether drafts may be asked for now, for any of `slots`."""
        rests = self.rests
        if self.is_in_debt:
            return False
        if not rests.left:
            return True
        if self._lookup is None or not rests.looks or rests.until_look > 0:
            return False
        try:
            return self._finds_long(self._lookup, tokens, slots)
        except Exception:  # noqa: BLE001  `propose` finds out for which request
            return True

    def _finds_long(self, lookup: LookupProposer, tokens: TokenTable, slots: Index) -> bool:
        """Return whether drafts of a long match are found for any of `slots`."""
        return lookup.finds_long(tokens, slots[self._asks[slots]])


class PredictedShares(NamedTuple):
    """Shares of a step's drafts, and of its accepted ones, that came from predictions."""

    of_drafted: float
    of_accepted: float

    @classmethod
    def of(cls, predicted: Bools, drafted: Int32s, accepted: Int32s) -> PredictedShares | None:
        """Return the shares of the rows `predicted`; None where there are none."""
        if not np.logical_or.reduce(predicted):
            return None
        num_drafted, num_accepted = int(np.add.reduce(drafted)), int(np.add.reduce(accepted))
        return cls(
            int(np.add.reduce(drafted[predicted])) / max(num_drafted, 1),
            int(np.add.reduce(accepted[predicted])) / max(num_accepted, 1),
        )

    def gained_ms(self, gained_ms: float, added_ms: float) -> float:
        """Return what drafts of predictions gained, where all gained `gained_ms` after the
        `added_ms` that they took: each accepted one saves as much, and each takes as much."""
        return self.of_accepted * (gained_ms + added_ms) - self.of_drafted * added_ms
