"""DraftChoice: which drafts are made and verified in a step: as many as pay, by the control.

The control is asked with the predicted cost of the step, and with what making drafts takes where a
model computes them. Whether drafts of an origin pay is noted in the rests of its account. Knows no
tokens, no clock and no errors: those of a proposer, and of prices and control, are passed on.
Always holds: no more drafts are chosen than were found or can be computed; where there are none,
no cost is predicted and the control is not asked; while little is known of a model's drafts, only
those are computed that the balance affords.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.token_table import TokenTable
from quire.speculative.control import Control, Passes, StepCost
from quire.speculative.draft_account import DraftAccount
from quire.speculative.guarded_proposers import Found, GuardedProposers
from quire.speculative.plain_counts import LONG_MATCHES

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Cost = Callable[[], "PredictedCost"]
# Over so many drafts the cost of catching up with a request is spread when the control decides.
DRAFTS_PER_CATCH_UP = 64.0
# With plans in flight: after so many steps in turn in which the last costs spoke against drafts,
# the control is asked with those of now.
MAX_REFUSED = 16


class PredictedCost(Protocol):
    """The scheduler's DraftCost; see StepCost."""

    @property
    def step_ms(self) -> float: ...

    @property
    def step_tokens(self) -> int: ...

    @property
    def added_ms(self) -> NDArray[np.float64]: ...

    @property
    def row_ms(self) -> float: ...

    @property
    def asked_ms(self) -> float: ...


class DraftChoice:
    """Of drafts of `proposers`. own, predictions: accounts of the engine's proposer, which has the
    rests and the balance of `control`, and of predictions. step_ms: of the step for which the
    control was asked last, 0 before."""

    def __init__(
        self,
        control: Control,
        proposers: GuardedProposers,
        own: DraftAccount,
        predictions: DraftAccount,
    ) -> None:
        self._control, self._proposers = control, proposers
        self._own, self._predictions = own, predictions
        self.step_ms = self._asked_ms = 0.0
        self._num_refused = 0  # steps in turn, by the last costs

    def would_pay(self, index: Index, found: Found) -> Bools:
        """Return for which of slots `index` some of the drafts that were found, or can be computed,
        would pay, as far as the costs of the last step say."""
        limits, predicted = found.limits, found.predicted
        # After a rest, or many refusals, the last costs may no longer hold: ask again.
        last = self._control.rests.last
        if self._num_refused >= MAX_REFUSED or (last and predicted is None):
            self._num_refused = 0
            return limits > 0
        pay: Bools = np.zeros(len(index), np.bool_)
        some = limits.nonzero()[0]
        if not len(some):
            return pay
        kinds = None if found.kinds is None else found.kinds[some]
        pay[some] = self._control.limits(index[some], limits[some], None, kinds) > 0
        if predicted is not None:
            pay |= (limits > 0) & (np.where(predicted, self._predictions.rests.last, last) > 0)
        self._num_refused = 0 if np.logical_or.reduce(pay) else self._num_refused + 1
        return pay

    def chosen(self, tokens: TokenTable, index: Index, found: Found, cost: Cost) -> Int32s:
        """Return how many of the drafts that were found, or can be computed, pay, the latter with
        their making. Raises ProposerFailed."""
        limits = found.limits
        some = limits.nonzero()[0]
        if not len(some):
            return limits
        passes, price, once_ms = None, cost(), 0.0
        if found.is_computed is None:
            draft_ms = np.zeros(len(some))
        else:
            rows = found.is_computed[some]
            num_computed = int(np.add.reduce(rows))
            making = self._proposers.making_ms(tokens, index[some], num_computed)
            pass_ms, behind_ms, once_ms = making
            passes = Passes(pass_ms, rows)
            draft_ms = rows * behind_ms / DRAFTS_PER_CATCH_UP
        self.step_ms, self._asked_ms = price.step_ms, price.asked_ms
        num_steps = self._control.rests.num_steps
        if self._proposers.num_predicting:
            num_steps = self._steps_since_asked()
        of_some = StepCost(
            price.step_ms,
            price.step_tokens,
            draft_ms,
            passes,
            num_steps,
            once_ms,
            price.row_ms,
            price.added_ms,
        )
        counts = np.zeros(len(index), np.int32)
        kinds = None if found.kinds is None else found.kinds[some]
        counts[some] = self._control.limits(index[some], limits[some], of_some, kinds)
        return counts

    def _steps_since_asked(self) -> int:
        """Return in how many steps the control was asked once, with this one, where either account
        may have asked it. One that no request asks, or that is in debt, counts no steps."""
        predictions, num_asking = self._predictions, self._proposers.num_asking
        accounts = (self._own, predictions) if num_asking else (predictions,)
        return min((one.rests.num_steps for one in accounts if not one.is_in_debt), default=1)

    def affordable(self, tokens: TokenTable, slots: Index) -> Bools:
        """Return for which of `slots` drafts are computed although little is known of them. Raises
        ProposerFailed."""
        balance = self._control.balance
        if balance is None:
            return np.ones(len(slots), np.bool_)
        return balance.affords(self._proposers.behind_ms(tokens, slots), self.step_ms)

    def keep_found(self, tokens: TokenTable, index: Index, found: Found, cost: Cost) -> bool:
        """Cut drafts that were all looked up to those that pay; return whether any do."""
        proposers, drafts, predicted = self._proposers, found.drafts, found.predicted
        if not proposers.mutes_proposer:
            self._control.rests.forget_misses()
        if predicted is not None and not proposers.mutes_predictions:
            self._predictions.rests.forget_misses()
        if not np.logical_or.reduce(drafts.counts):
            return False
        is_own = None if predicted is None else (drafts.counts > 0) & ~predicted
        drafts.counts[:] = self.chosen(tokens, index, found, cost)
        pays = bool(np.logical_or.reduce(drafts.counts))
        paying = drafts.counts
        if self._control.tried_slot >= 0:  # beside others that pay
            paying = paying * (index != self._control.tried_slot)
        if is_own is None or np.logical_or.reduce(is_own):
            counts = paying if is_own is None else paying * is_own
            are_long = has_long = False
            if found.kinds is not None:
                is_long = found.kinds == LONG_MATCHES
                are_long = not np.logical_or.reduce(counts * ~is_long)
                has_long = bool(np.logical_or.reduce(is_long))
            of_own = pays if is_own is None else bool(np.logical_or.reduce(counts))
            self._note(self._own, pays=of_own, are_long=are_long, has_long=has_long)
        if predicted is not None:
            self._note_predictions(predicted, paying)
        return pays

    def note_computed(
        self,
        index: Index,
        predicted: Bools | None,
        counts: Int32s,
        *,
        pays: bool,
        possible: bool,
        plain_ms: float,
    ) -> None:
        """Note whether drafts pay that a model computes, or that none were possible. predicted: see
        Found. counts: of these, how many are verified. plain_ms: what a step takes without drafts;
        0: that is unknown."""
        proposers, rests = self._proposers, self._own.rests
        if predicted is None or (
            not proposers.mutes_proposer
            and np.logical_or.reduce(proposers.asks_proposer[index] & ~predicted)
        ):
            step_ms = plain_ms or self.step_ms  # the control was asked long ago, if ever
            if possible:
                self._note(self._own, pays=pays)
            elif rests.has_missed and step_ms:
                self._note(self._own, pays=False, step_ms=step_ms)
            else:  # heads may lack hidden states that the next step leaves behind: ask soon, once
                rests.note_miss(step_ms)
        if predicted is not None:
            self._note_predictions(predicted, counts)

    def note_success(self, is_right: Bools, predicted: Bools | None) -> None:
        """Note of which rows drafts were right that were tried. predicted: see Found."""
        if predicted is None:
            if np.logical_or.reduce(is_right):
                self._own.rests.note_success()
            return
        for account, rows in ((self._own, ~predicted), (self._predictions, predicted)):
            if np.logical_or.reduce(is_right & rows):
                account.rests.note_success()

    def _note_predictions(self, predicted: Bools, counts: Int32s) -> None:
        """Note whether drafts of predictions pay, if any were found."""
        if np.logical_or.reduce(predicted):
            pays = bool(np.logical_or.reduce(counts * predicted))
            self._note(self._predictions, pays=pays, has_long=True)

    def _note(
        self,
        account: DraftAccount,
        *,
        pays: bool,
        are_long: bool = False,
        has_long: bool = False,
        step_ms: float = 0.0,
    ) -> None:
        control = self._control
        account.rests.note_choice(
            pays=pays and not control.probes,
            step_ms=step_ms or self.step_ms,
            asked_ms=self._asked_ms,
            speedup=control.speedup,
            are_long=are_long,
            has_long=has_long,
        )
