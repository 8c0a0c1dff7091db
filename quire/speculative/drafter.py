"""Drafter: drafts for running requests: when they are asked for, and what they gained.

The scheduler's DraftSource. Drafts have two origins, the texts that requests predict and the
engine's proposer; each has rests and a balance of its own (DraftAccount). Proposers that only look
up tokens are asked before DraftChoice chooses among what they found; one that computes a model
(CostlyProposer) is asked afterwards, for what was chosen. Knows neither what a proposer does nor
what drafts cost. Always holds: while both origins rest, no proposer and no control is asked; an
error of a proposer ends there (GuardedProposers), and one of any other part of speculation, such as
prices and control, ends drafts for all requests, and no answer.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.base.records import NO_INTS, Request
from quire.base.report import Field, Report
from quire.base.token_table import TokenTable
from quire.speculative.control import Control
from quire.speculative.draft_account import UNTIL_EARNED, DraftAccount, PredictedShares
from quire.speculative.draft_balance import MAX_COMPUTED_STEPS, DraftBalance
from quire.speculative.draft_choice import Cost, DraftChoice
from quire.speculative.guarded_proposers import GuardedProposers, ProposerFailed
from quire.speculative.proposer import Drafts, LookupProposer, Proposer

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
# How long a draft model may catch up with prompts in a step, in times of the step.
CATCH_UP_SHARE = 0.5
# Steps that must be earned before a model that was given up drafts again: it first computes texts.
RETRY_STEPS = 4.0


class Drafter:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step.

    proposer: of the engine. prediction: proposes from the texts that requests bring. report:
    receives the errors. num_proposer_errors: requests that lost their drafts as a proposer raised,
    and such errors without a request's loss. num_errors: of any other part; no drafts after it.
    """

    def __init__(
        self,
        proposer: Proposer,
        prediction: Proposer,
        control: Control,
        *,
        num_slots: int,
        max_drafts: int,
        vocab_size: int,
        report: Report,
    ) -> None:
        self.max_drafts, self.drafting_ms, self.notes_plain_steps = max_drafts, 0.0, False
        self.num_proposer_errors = self.num_errors = 0
        self.plain_ms = 0.0
        self.proposer, self.proposer_name = proposer, proposer.name
        self._control, self._report = control, report
        self._proposers = proposers = GuardedProposers(
            proposer,
            prediction,
            num_slots=num_slots,
            max_drafts=max_drafts,
            vocab_size=vocab_size,
            report=self._report_proposer,
        )
        self.learns, self.uses_cache = proposers.learns, proposers.uses_cache
        self.notes_rests = proposers.pauses
        self.may_begin_late = proposers.may_begin_late
        control.rests.looks = proposers.knows_matches
        if control.balance is not None and proposers.computes:
            control.balance.retry_steps = RETRY_STEPS
        # Which slots had their last drafts from a prediction; None before one was asked.
        self.from_prediction: Bools | None = None
        self._own = DraftAccount(proposer, proposers.asks_proposer, control.rests, control.balance)
        balance = None if control.balance is None else DraftBalance()
        rests = control.rests.another(looks=isinstance(prediction, LookupProposer))
        self._predictions = DraftAccount(prediction, proposers.asks_prediction, rests, balance)
        self._choice = DraftChoice(control, proposers, self._own, self._predictions)
        # Which slots had their last drafts to learn, and whether any has not been verified.
        self._was_trial: Bools = np.zeros(num_slots, np.bool_)
        self._has_trials = False
        # Of the drafts verified last: what part is of predictions, and whether they were a trial.
        self._predicted_shares: PredictedShares | None = None
        self._verified_trial = False

    def close(self) -> None:
        """Free what the proposers hold."""
        self._proposers.close()

    def begin(self, slot: int, request: Request) -> None:
        """See DraftSource."""
        assert request.speculation is not None, "only requests that speculate begin"
        self._was_trial[slot] = False
        if self.from_prediction is not None:
            self.from_prediction[slot] = False
        predicts = len(request.speculation.prediction_ids) > 0
        if predicts:
            self._predictions.note_arrivals(1, self._proposers.num_predicting + 1)
        self._control.begin(slot, predicts=predicts)
        self._proposers.begin(slot, request, predicts=predicts)

    def learn(self, slot: int, output: Int32s) -> None:
        """See DraftSource."""
        self._proposers.learn(slot, output)

    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """See DraftSource."""
        self._proposers.note_kv(slots, block_tables, capacities)

    def end(self, slot: int) -> None:
        """See DraftSource."""
        self._proposers.end(slot)

    def note_step(
        self,
        step_ms: float,
        gained_ms: float | None,
        computed_ms: float,
        num_steps: int = 1,
        added_ms: float = 0.0,
    ) -> None:
        """See DraftSource."""
        balance = self._control.balance
        known_ms = self._proposers.caught_up_ms() if computed_ms > 0.0 else 0.0
        if balance is None or self.num_errors:
            return
        predictions = self._predictions.balance
        if predictions is not None and not (
            predictions.is_settled and self._predicted_shares is None
        ):
            gained_ms = self._note_predicted_part(
                predictions, step_ms, gained_ms, num_steps, added_ms
            )
        caught_up_ms = min(known_ms, computed_ms)
        if computed_ms > 0.0:
            if gained_ms is None:  # nothing was drafted: all of it
                more_ms = computed_ms - caught_up_ms
                caught_up_ms += min(more_ms, MAX_COMPUTED_STEPS * step_ms)
            balance.caught_up(caught_up_ms)
        if gained_ms is None:
            balance.plain(step_ms, num_steps)
        elif gained_ms > 0.0 or not self._verified_trial:
            balance.drafted(gained_ms, step_ms, computed_ms - caught_up_ms)
        self.notes_plain_steps = not (
            balance.is_settled and (predictions is None or predictions.is_settled)
        )

    def _note_predicted_part(
        self,
        balance: DraftBalance,
        step_ms: float,
        gained_ms: float | None,
        num_steps: int,
        added_ms: float,
    ) -> float | None:
        """Note in the `balance` of predictions what theirs of a step's drafts gained; return what
        the others did, None where there were none."""
        shares, self._predicted_shares = self._predicted_shares, None
        if gained_ms is None or shares is None:
            balance.plain(step_ms, num_steps)
            return gained_ms
        part_ms = shares.gained_ms(gained_ms, added_ms)
        if part_ms > 0.0 or not self._verified_trial:
            balance.drafted(part_ms, step_ms)
        return gained_ms - part_ms if shares.of_drafted < 1.0 else None

    @property
    def rest_steps(self) -> int:
        """See DraftSource."""
        if self.num_errors:
            return UNTIL_EARNED
        if not self._proposers.num_predicting:  # as of the account: a call less in each step
            balance, rests = self._control.balance, self._control.rests
            if balance is not None and not balance.allows_drafts:
                return UNTIL_EARNED
            return rests.quiet if rests.looks else rests.left
        steps = self._predictions.rest_steps
        return min(steps, self._own.rest_steps) if self._proposers.num_asking else steps

    @property
    def asks_predictions_only(self) -> bool:
        """See DraftSource."""
        return self._proposers.num_predicting > 0 and not self._proposers.num_asking

    def rested(self, num_steps: int) -> None:
        """See DraftSource."""
        self._own.rested(num_steps)
        if self._proposers.num_predicting:
            self._predictions.rested(num_steps)

    def note_rest(self, step: int, num_steps: int) -> None:
        """See DraftSource."""
        balance = self._control.balance
        if num_steps == UNTIL_EARNED and balance is not None and not self.num_errors:
            num_steps = balance.steps_to_earn
        self._proposers.note_rest(step, num_steps)

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        """See DraftSource."""
        self._own.note_arrivals(num_new, num_running)

    def skips_step(self, tokens: TokenTable, able_slots: Callable[[], Index]) -> bool:
        """See DraftSource."""
        if self.num_errors:
            return True
        if not self._proposers.num_predicting:
            rests = self._control.rests
            if rests.left and (not rests.looks or rests.until_look > 0):  # most steps
                rests.left -= 1
                rests.until_look -= 1
                return True
            return self._own.skips_step(tokens, able_slots, self._choice.step_ms or self.plain_ms)
        proposers, step_ms = self._proposers, self._choice.step_ms or self.plain_ms
        given = tokens, able_slots, step_ms
        proposers.mutes_predictions = self._predictions.skips_step(*given)
        proposers.mutes_proposer = not proposers.num_asking or self._own.skips_step(*given)
        return proposers.mutes_predictions and proposers.mutes_proposer

    def takes_plain_step(self) -> bool:
        """See DraftSource."""
        is_due = self._control.rests.takes_plain_step()
        if self._proposers.num_predicting:
            is_due |= self._predictions.rests.takes_plain_step()
        return is_due

    def would_propose(self, tokens: TokenTable, index: Index, limits: Int32s) -> Bools:
        """See DraftSource."""
        try:
            is_open, predicts = not self.num_errors, self._proposers.num_predicting > 0
            of_predictions = predicts and is_open and self._predictions.is_open(tokens, index)
            of_proposer = is_open and self._own.is_open(tokens, index)
            if not (of_proposer or of_predictions):
                return np.zeros(len(index), np.bool_)
            found = self._proposers.find(
                tokens, index, limits, of_proposer=of_proposer, of_predictions=of_predictions
            )
            return self._choice.would_pay(index, found)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  nothing waits for drafts
            self._lose(index, error)
            return np.zeros(len(index), np.bool_)

    def propose(
        self, tokens: TokenTable, index: Index, limits: Int32s, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """See DraftSource."""
        try:
            found = self._proposed(tokens, index, limits, cost)
            if self._control.probes or self._has_trials:
                self._was_trial[index] = self._control.probes
                self._has_trials = True
            return found
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  no draft, no harm
            self._lose(index, error)
            return np.zeros(len(index), np.int32), NO_INTS

    def _proposed(
        self, tokens: TokenTable, index: Index, limits: Int32s, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of what pays."""
        proposers, choice = self._proposers, self._choice
        found = proposers.find(
            tokens,
            index,
            limits,
            of_proposer=not proposers.mutes_proposer,
            of_predictions=not proposers.mutes_predictions,
        )
        drafts, predicted = found.drafts, found.predicted
        if predicted is not None:
            self._note_predicted(index, predicted)
        if (is_computed := found.is_computed) is None:
            pays = choice.keep_found(tokens, index, found, cost)
            return self._joined(drafts) if pays else (drafts.counts, NO_INTS)
        counts = choice.chosen(tokens, index, found, cost)
        some = (is_computed & (counts > 0)).nonzero()[0]
        if len(some) and not self._control.is_informed:
            some = some[self._affordable(tokens, index[some])]
        drafts.counts[~is_computed] = counts[~is_computed]
        possible = bool(np.logical_or.reduce(is_computed))
        choice.note_computed(
            index,
            predicted,
            drafts.counts,
            pays=len(some) > 0,
            possible=possible,
            plain_ms=self.plain_ms,
        )
        if len(some):
            step = cost()
            is_alone = step.step_tokens <= 1  # then it delays no other request
            share = math.inf if is_alone else CATCH_UP_SHARE
            made, self.drafting_ms = proposers.compute(
                tokens, index[some], counts[some], share * step.step_ms
            )
            drafts.ids[some], drafts.counts[some] = made.ids, made.counts
        elif not np.logical_or.reduce(drafts.counts):
            return drafts.counts, NO_INTS
        return self._joined(drafts)

    def _affordable(self, tokens: TokenTable, slots: Index) -> Bools:
        """Return for which of `slots` drafts are computed although little is known of them, which
        may end those of all."""
        affordable = self._choice.affordable(tokens, slots)
        if self._control.balance is not None:
            self.notes_plain_steps = True  # this step, after which note_step says about others
        return affordable

    def _note_predicted(self, index: Index, predicted: Bools) -> None:
        """Note which rows have drafts of predictions."""
        if self.from_prediction is None:
            self.from_prediction = np.zeros(len(self._proposers.asks_prediction), np.bool_)
        self.from_prediction[index] = predicted

    def _joined(self, drafts: Drafts) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of all, in order."""
        return drafts.counts, drafts.ids[np.arange(self.max_drafts) < drafts.counts[:, None]]

    def verified(self, index: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See DraftSource."""
        try:
            self._control.verified(index, drafted, accepted)
            self._predicted_shares = predicted = None
            self._verified_trial = self._has_trials and self._take_trials(index)
            if self._proposers.num_predicting and self.from_prediction is not None:
                predicted = self.from_prediction[index]
                self._predicted_shares = PredictedShares.of(predicted, drafted, accepted)
            if self._verified_trial:
                self._choice.note_success(2 * accepted >= drafted, predicted)
        except Exception as error:  # noqa: BLE001  the tokens are known
            self.fail(error)
        self._proposers.verified(index, drafted, accepted)

    def _take_trials(self, index: Index) -> bool:
        """Return whether any of slots `index` had its last drafts to learn, which are over then.

        While one plan is computed, the control may choose for the next.
        """
        found = bool(np.logical_or.reduce(self._was_trial[index]))
        self._was_trial[index] = False
        self._has_trials = bool(np.logical_or.reduce(self._was_trial))
        return found

    def _lose(self, index: Index, error: Exception) -> None:
        """Propose no more for slots `index` if a proposer raised `error`, or else for any."""
        if isinstance(error, ProposerFailed):
            assert isinstance(error.__cause__, Exception), "of a proposer"
            asks = self._proposers.asks_proposer[index]  # of the engine's, which computes drafts
            self._proposers.give_up_all(index[asks], error.__cause__)
        else:
            self.fail(error)

    def _report_proposer(self, what: str, **fields: Field) -> None:
        """Count and report an error of a proposer."""
        self.num_proposer_errors += 1
        self._report(what, **fields)

    def fail(self, error: Exception) -> None:
        """See DraftSource."""
        self.num_errors += 1
        self.notes_plain_steps = False
        if self.num_errors > 1:  # of steps in flight
            return
        self._report(
            "speculation failed and is off until the server starts again; please report this bug",
            error=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
