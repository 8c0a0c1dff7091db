"""Drafter: drafts for running requests, from their proposers, as many as the control chooses.

The scheduler's DraftSource. A request's predicted text is asked first, then the engine's proposer;
each of the two has rests and a balance of its own (DraftAccount). Proposers that only look up
tokens are asked before the control chooses among what they found; one that computes a model
(CostlyProposer) is asked afterwards, for what the control chose. Always holds: drafts are token ids
of the model; a proposer that raises costs the request its drafts and nothing else, unless the
device of the model is lost; an error of any other part of speculation, such as prices and control,
ends drafts for all requests, and no answer.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.base.records import NO_INTS, Request
from quire.base.report import Report
from quire.base.token_table import TokenTable
from quire.speculative.control import Control, Passes, StepCost
from quire.speculative.draft_account import UNTIL_EARNED, DraftAccount, PredictedShares
from quire.speculative.draft_balance import DraftBalance
from quire.speculative.proposer import (
    LONG_MATCH,
    CacheProposer,
    CostlyProposer,
    Drafts,
    LearningProposer,
    LookupProposer,
    Proposer,
    no_drafts,
)

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Cost = Callable[[], "PredictedCost"]
# How long a draft model may catch up with prompts in a step, in times of the step.
CATCH_UP_SHARE = 0.5
# Steps that must be earned before a model that was given up drafts again: it first computes texts.
RETRY_STEPS = 4.0
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


class ProposerFailed(Exception):
    """A proposer raised its cause."""


class AsksProposer:
    """A context in which a proposer is asked: what it raises becomes ProposerFailed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DeviceLost):
            raise ProposerFailed from error


ASKS_PROPOSER = AsksProposer()


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
        self._proposer, self._prediction = proposer, prediction
        self._costly = proposer if isinstance(proposer, CostlyProposer) else None
        self._lookup = proposer if isinstance(proposer, LookupProposer) else None
        self._learner = proposer if isinstance(proposer, LearningProposer) else None
        self._in_cache = proposer if isinstance(proposer, CacheProposer) else None
        self.learns, self.uses_cache = self._learner is not None, self._in_cache is not None
        self.may_begin_late = proposer.may_begin_late and not (self.learns or self.uses_cache)
        self.proposer_name = proposer.name
        self._control, self._report, self._vocab_size = control, report, vocab_size
        control.rests.looks = self._lookup is not None and self._lookup.knows_matches
        if control.balance is not None and self._costly is not None:
            control.balance.retry_steps = RETRY_STEPS
        self._request_ids = [""] * num_slots
        self._catching_up_ms = 0.0  # of the costly proposer, when it was noted last
        # Of the step for which the control was asked last, and for that.
        self._step_ms = self._asked_ms = 0.0
        self._num_predicting = self._num_asking = 0  # requests that bring a prediction; others
        self._num_refused = 0  # steps in turn, by the last costs
        # Which slots had their last drafts from a prediction; None before one was asked.
        self.from_prediction: Bools | None = None
        # Which slots ask either proposer.
        self._asks_proposer = np.zeros(num_slots, np.bool_)
        self._asks_prediction = np.zeros(num_slots, np.bool_)
        self._own = DraftAccount(proposer, self._asks_proposer, control.rests, control.balance)
        balance = None if control.balance is None else DraftBalance()
        rests = control.rests.another(looks=isinstance(prediction, LookupProposer))
        self._predictions = DraftAccount(prediction, self._asks_prediction, rests, balance)
        # Which of the two rests in this step, beside a request with a prediction.
        self._mutes_proposer = self._mutes_predictions = False
        self._predicted_shares: PredictedShares | None = None  # of the drafts verified last

    def close(self) -> None:
        """Free what the proposers hold."""
        for proposer, _ in self._proposers():
            proposer.close()

    def begin(self, slot: int, request: Request) -> None:
        """See DraftSource."""
        speculation = request.speculation
        assert speculation is not None, "only requests that speculate begin"
        self._request_ids[slot] = request.request_id
        if self.from_prediction is not None:
            self.from_prediction[slot] = False
        self._asks_proposer[slot] = speculation.uses_proposer
        self._num_asking += speculation.uses_proposer
        predicts = len(speculation.prediction_ids) > 0
        self._asks_prediction[slot] = predicts
        if predicts:
            self._num_predicting += 1
            self._predictions.note_arrivals(1, self._num_predicting)
        self._control.begin(slot, predicts=predicts)
        for proposer, asks in self._proposers():
            if asks[slot]:
                try:
                    proposer.begin(slot, request)
                except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
                    self._give_up(slot, error)

    def learn(self, slot: int, output: Int32s) -> None:
        """See DraftSource."""
        if self._learner is not None and self._asks_proposer[slot]:
            try:
                self._learner.learn(slot, output)
            except Exception as error:  # noqa: BLE001  of whatever proposes: nothing is learned
                self._give_up(slot, error)

    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """See DraftSource."""
        assert self._in_cache is not None, "drafts are computed with the target's cache"
        try:
            self._in_cache.note_kv(slots, block_tables, capacities)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
            self._give_up_all(slots, error)

    def end(self, slot: int) -> None:
        """See DraftSource."""
        for proposer, asks in self._proposers():
            if asks[slot]:
                self._end(proposer, slot)
        self._asks_nothing(slot)

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
        known_ms = self._caught_up_ms() if computed_ms > 0.0 else 0.0
        if balance is None or self.num_errors:
            return
        predictions = self._predictions.balance
        if predictions is not None and not (
            predictions.is_settled and self._predicted_shares is None
        ):
            gained_ms = self._note_predicted_part(
                predictions, step_ms, gained_ms, num_steps, added_ms
            )
        caught_up_ms = computed_ms
        if computed_ms > 0.0:  # all of it, where nothing was drafted
            caught_up_ms = computed_ms if gained_ms is None else min(known_ms, computed_ms)
            balance.caught_up(caught_up_ms)
        if gained_ms is None:
            balance.plain(step_ms, num_steps)
        elif gained_ms > 0.0 or not self._control.probes:
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
        if part_ms > 0.0 or not self._control.probes:
            balance.drafted(part_ms, step_ms)
        return gained_ms - part_ms if shares.of_drafted < 1.0 else None

    def _caught_up_ms(self) -> float:
        """Return how long known tokens were computed since this was asked last."""
        assert self._costly is not None, "drafts are computed"
        before, self._catching_up_ms = self._catching_up_ms, self._costly.catching_up_ms
        return self._catching_up_ms - before

    @property
    def rest_steps(self) -> int:
        """See DraftSource."""
        if self.num_errors:
            return UNTIL_EARNED
        if not self._num_predicting:  # as of the account: a call less in each step
            balance, rests = self._control.balance, self._control.rests
            if balance is not None and not balance.allows_drafts:
                return UNTIL_EARNED
            return rests.quiet if rests.looks else rests.left
        steps = self._predictions.rest_steps
        return min(steps, self._own.rest_steps) if self._num_asking else steps

    def rested(self, num_steps: int) -> None:
        """See DraftSource."""
        self._own.rested(num_steps)
        if self._num_predicting:
            self._predictions.rested(num_steps)

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        """See DraftSource."""
        self._own.note_arrivals(num_new, num_running)

    def skips_step(self, tokens: TokenTable, able_slots: Callable[[], Index]) -> bool:
        """See DraftSource."""
        if self.num_errors:
            return True
        if not self._num_predicting:
            rests = self._control.rests
            if rests.left and (not rests.looks or rests.until_look > 0):  # most steps
                rests.left -= 1
                rests.until_look -= 1
                return True
            return self._own.skips_step(tokens, able_slots, self._step_ms)
        step_ms = self._step_ms
        self._mutes_predictions = self._predictions.skips_step(tokens, able_slots, step_ms)
        self._mutes_proposer = not self._num_asking or self._own.skips_step(
            tokens, able_slots, step_ms
        )
        return self._mutes_predictions and self._mutes_proposer

    def takes_plain_step(self) -> bool:
        """See DraftSource."""
        is_due = self._control.rests.takes_plain_step()
        if self._num_predicting:
            is_due |= self._predictions.rests.takes_plain_step()
        return is_due

    def would_propose(self, tokens: TokenTable, index: Index, limits: Int32s) -> Bools:
        """See DraftSource."""
        try:
            is_open, predicts = not self.num_errors, self._num_predicting > 0
            of_predictions = predicts and is_open and self._predictions.is_open(tokens, index)
            of_proposer = is_open and self._own.is_open(tokens, index)
            if not (of_proposer or of_predictions):
                return np.zeros(len(index), np.bool_)
            drafts, may_compute, predicted = self._found(
                tokens, index, limits, of_proposer=of_proposer, of_predictions=of_predictions
            )
            limits = drafts.counts + may_compute
            # After a rest, or many refusals, the last costs may no longer hold: ask again.
            last = self._control.rests.last
            if self._num_refused >= MAX_REFUSED or (last and predicted is None):
                self._num_refused = 0
                return limits > 0
            pay = self._chosen(tokens, index, limits, drafts.matches, may_compute > 0, None) > 0
            if predicted is not None:
                pay |= (limits > 0) & (np.where(predicted, self._predictions.rests.last, last) > 0)
            if np.logical_or.reduce(limits):
                self._num_refused = 0 if np.logical_or.reduce(pay) else self._num_refused + 1
            return pay
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
            return self._proposed(tokens, index, limits, cost)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  no draft, no harm
            self._lose(index, error)
            return np.zeros(len(index), np.int32), NO_INTS

    def _lose(self, index: Index, error: Exception) -> None:
        """Propose no more for slots `index` if a proposer raised `error`, or else for any."""
        if isinstance(error, ProposerFailed):
            assert isinstance(error.__cause__, Exception), "of a proposer"
            self._give_up_all(index, error.__cause__)
        else:
            self.fail(error)

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

    def _proposed(
        self, tokens: TokenTable, index: Index, limits: Int32s, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of what pays."""
        drafts, may_compute, predicted = self._found(
            tokens,
            index,
            limits,
            of_proposer=not self._mutes_proposer,
            of_predictions=not self._mutes_predictions,
        )
        if predicted is not None:
            self._note_predicted(index, predicted)
        if self._costly is None:
            return self._looked_up(tokens, index, drafts, predicted, cost)
        is_computed = may_compute > 0
        limits = drafts.counts + may_compute
        counts = self._chosen(tokens, index, limits, drafts.matches, is_computed, cost)
        some = (is_computed & (counts > 0)).nonzero()[0]
        if len(some) and not self._control.is_informed:
            some = some[self._affordable(tokens, index[some])]
        drafts.counts[~is_computed] = counts[~is_computed]
        if predicted is None:
            pays = len(some) > 0 or bool(np.logical_or.reduce(drafts.counts))
            self._note_choice(self._own, pays=pays)
        else:
            if not self._mutes_proposer and np.logical_or.reduce(
                self._asks_proposer[index] & ~predicted
            ):
                self._note_choice(self._own, pays=len(some) > 0)
            self._note_prediction_choice(predicted, drafts.counts)
        if len(some):
            made = no_drafts(len(some), self.max_drafts)
            step = cost()
            is_alone = step.step_tokens <= 1  # then it delays no other request
            share = math.inf if is_alone else CATCH_UP_SHARE
            self._costly.catch_up_ms = share * step.step_ms
            self._ask(self._proposer, tokens, index[some], counts[some], made)
            self.drafting_ms = self._costly.drafting_ms
            drafts.ids[some], drafts.counts[some] = made.ids, made.counts
        elif not np.logical_or.reduce(drafts.counts):
            return drafts.counts, NO_INTS
        return self._joined(drafts)

    def _affordable(self, tokens: TokenTable, slots: Index) -> Bools:
        """Return for which of `slots` drafts are tried although little is known of them."""
        balance = self._control.balance
        if balance is None:
            return np.ones(len(slots), np.bool_)
        assert self._costly is not None, "drafts are computed"
        with ASKS_PROPOSER:
            behind_ms = self._costly.behind_ms(tokens, slots)
        affordable = balance.affords(behind_ms, self._step_ms)
        predictions = self._predictions.balance
        self.notes_plain_steps = not (
            balance.is_settled and (predictions is None or predictions.is_settled)
        )
        return affordable

    def _looked_up(
        self,
        tokens: TokenTable,
        index: Index,
        drafts: Drafts,
        predicted: Bools | None,
        cost: Cost,
    ) -> tuple[Int32s, Int32s]:
        """Return what of the `drafts` found pays; no model is computed."""
        if not self._mutes_proposer:
            self._control.rests.forget_misses()
        if predicted is not None and not self._mutes_predictions:
            self._predictions.rests.forget_misses()
        if not np.logical_or.reduce(drafts.counts):
            return drafts.counts, NO_INTS
        is_own = None if predicted is None else (drafts.counts > 0) & ~predicted
        drafts.counts[:] = self._chosen(
            tokens, index, drafts.counts, drafts.matches, drafts.counts < 0, cost
        )
        pays = bool(np.logical_or.reduce(drafts.counts))
        if is_own is None or np.logical_or.reduce(is_own):
            counts = drafts.counts if is_own is None else drafts.counts * is_own
            are_long = has_long = False
            if self._control.rests.looks:
                is_long = drafts.matches >= LONG_MATCH
                are_long = not np.logical_or.reduce(counts * ~is_long)
                has_long = bool(np.logical_or.reduce(is_long))
            of_own = pays if is_own is None else bool(np.logical_or.reduce(counts))
            self._note_choice(self._own, pays=of_own, are_long=are_long, has_long=has_long)
        if predicted is not None:
            self._note_prediction_choice(predicted, drafts.counts)
        return self._joined(drafts) if pays else (drafts.counts, NO_INTS)

    def _note_prediction_choice(self, predicted: Bools, counts: Int32s) -> None:
        """Note whether drafts of predictions pay, if any were found. predicted: rows with some."""
        if np.logical_or.reduce(predicted):
            pays = bool(np.logical_or.reduce(counts * predicted))
            self._note_choice(self._predictions, pays=pays, has_long=True)

    def _note_choice(
        self,
        account: DraftAccount,
        *,
        pays: bool,
        are_long: bool = False,
        has_long: bool = False,
    ) -> None:
        control = self._control
        account.rests.note_choice(
            pays=pays and not control.probes,
            step_ms=self._step_ms,
            asked_ms=self._asked_ms,
            speedup=control.speedup,
            are_long=are_long,
            has_long=has_long,
        )

    def _joined(self, drafts: Drafts) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of all, in order."""
        return drafts.counts, drafts.ids[np.arange(self.max_drafts) < drafts.counts[:, None]]

    def _found(
        self,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        *,
        of_proposer: bool,
        of_predictions: bool,
    ) -> tuple[Drafts, Int32s, Bools | None]:
        """Return the drafts that are known without computing a model, for requests that have none
        how many could be computed, and which rows have drafts of predictions; None: no request
        brings any. of_proposer, of_predictions: whether these are asked."""
        drafts, predicted = no_drafts(len(index), self.max_drafts), None
        may_compute = np.zeros(len(index), np.int32)
        is_plain = self._costly is None and not self._num_predicting
        if is_plain and np.logical_and.reduce(self._asks_proposer[index]):  # all at once
            self._ask(self._proposer, tokens, index, limits, drafts)
            return drafts, may_compute, None
        if self._num_predicting:
            if of_predictions:
                self._look_up(
                    self._prediction, self._asks_prediction, tokens, index, limits, drafts
                )
            predicted = drafts.counts > 0
        if not of_proposer:
            pass
        elif self._costly is None:
            self._look_up(self._proposer, self._asks_proposer, tokens, index, limits, drafts)
        else:
            some = self._without_drafts(self._asks_proposer, index, limits, drafts)
            if len(some):
                with ASKS_PROPOSER:
                    may_compute[some] = self._costly.possible(tokens, index[some], limits[some])
        return drafts, may_compute, predicted

    def _look_up(
        self,
        proposer: Proposer,
        asks: Bools,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        drafts: Drafts,
    ) -> None:
        """Ask a proposer that computes nothing for the rows that have no drafts yet."""
        some = self._without_drafts(asks, index, limits, drafts)
        if not len(some):
            return
        found = no_drafts(len(some), self.max_drafts)
        self._ask(proposer, tokens, index[some], limits[some], found)
        for into, parts in zip(drafts, found, strict=True):
            into[some] = parts

    def _without_drafts(self, asks: Bools, index: Index, limits: Int32s, drafts: Drafts) -> Index:
        """Return the rows that ask a proposer and have no drafts yet."""
        rows: Index = (asks[index] & (limits > 0) & (drafts.counts == 0)).nonzero()[0]
        return rows

    def _note_predicted(self, index: Index, predicted: Bools) -> None:
        """Note which rows have drafts of predictions."""
        if self.from_prediction is None:
            self.from_prediction = np.zeros(len(self._asks_prediction), np.bool_)
        self.from_prediction[index] = predicted

    def _chosen(
        self,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        matches: Int32s,
        is_computed: Bools,
        cost: Cost | None,
    ) -> Int32s:
        """Return how many of limits[i] drafts pay, those of rows `is_computed` with their making.

        matches: see Drafts. cost: None: as in the last step.
        """
        some = limits.nonzero()[0]
        if not len(some):
            return limits
        of_some = None
        if cost is not None:
            passes, predicted, once_ms = None, cost(), 0.0
            if self._costly is None:
                draft_ms = np.zeros(len(some))
            else:
                rows = is_computed[some]
                with ASKS_PROPOSER:
                    passes = Passes(self._costly.pass_ms(int(np.add.reduce(rows))), rows)
                    behind_ms = self._costly.behind_ms(tokens, index[some])
                    once_ms = self._costly.call_ms()
                draft_ms = rows * behind_ms / DRAFTS_PER_CATCH_UP
            self._step_ms, self._asked_ms = predicted.step_ms, predicted.asked_ms
            num_steps = self._control.rests.num_steps
            if self._num_predicting:  # which are asked in other steps
                num_steps = min(num_steps, self._predictions.rests.num_steps)
            of_some = StepCost(
                predicted.step_ms,
                predicted.step_tokens,
                draft_ms,
                passes,
                num_steps,
                once_ms,
                predicted.row_ms,
                predicted.added_ms,
            )
        counts = np.zeros(len(index), np.int32)
        are_long = matches[some] >= LONG_MATCH if self._control.rests.looks else None
        counts[some] = self._control.limits(index[some], limits[some], of_some, are_long)
        return counts

    def verified(self, index: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See DraftSource."""
        try:
            self._control.verified(index, drafted, accepted)
            self._predicted_shares = predicted = None
            if self._num_predicting and self.from_prediction is not None:
                predicted = self.from_prediction[index]
                self._predicted_shares = PredictedShares.of(predicted, drafted, accepted)
            if self._control.probes:
                self._note_success(2 * accepted >= drafted, predicted)
        except Exception as error:  # noqa: BLE001  the tokens are known
            self.fail(error)
        for proposer, asks in self._proposers():
            some = asks[index]
            if not np.logical_or.reduce(some):
                continue
            of_some = index, drafted, accepted
            if not np.logical_and.reduce(some):
                of_some = index[some], drafted[some], accepted[some]
            try:
                proposer.verified(*of_some)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001  of whatever proposes: the tokens are known
                self._give_up_all(of_some[0], error)

    def _note_success(self, is_right: Bools, predicted: Bools | None) -> None:
        """Note of which rows drafts that were tried were right."""
        if predicted is None:
            if np.logical_or.reduce(is_right):
                self._own.rests.note_success()
            return
        for account, rows in ((self._own, ~predicted), (self._predictions, predicted)):
            if np.logical_or.reduce(is_right & rows):
                account.rests.note_success()

    def _proposers(self) -> tuple[tuple[Proposer, NDArray[np.bool_]], ...]:
        return (
            (self._prediction, self._asks_prediction),
            (self._proposer, self._asks_proposer),
        )

    def _ask(
        self, proposer: Proposer, tokens: TokenTable, slots: Index, limits: Int32s, found: Drafts
    ) -> None:
        """Ask for all `slots` at once; one by one if that raises, so that one failure is one's."""
        try:
            proposer.propose(tokens, slots, limits, found)
        except DeviceLost:  # nor can any step be computed
            raise
        except Exception as error:  # noqa: BLE001  see above
            found.counts[:] = 0
            if len(slots) == 1:
                self._give_up(int(slots[0]), error)
                return
            for at in range(len(slots)):
                one = slice(at, at + 1)
                part = Drafts(*(buffer[one] for buffer in found))
                self._ask(proposer, tokens, slots[one], limits[one], part)
            return
        np.minimum(found.counts, limits, out=found.counts)
        # Negative ids are large ones here.
        if int(np.maximum.reduce(found.ids.view(np.uint32), axis=None)) < self._vocab_size:
            return
        is_bad = (found.ids < 0) | (found.ids >= self._vocab_size)
        num_good = np.where(is_bad.any(axis=1), is_bad.argmax(axis=1), found.ids.shape[1])
        np.minimum(found.counts, num_good, out=found.counts)

    def _give_up(self, slot: int, error: Exception) -> None:
        """Propose no more for the request in `slot`."""
        for proposer, asks in self._proposers():
            if asks[slot]:
                self._end(proposer, slot)
        self._asks_nothing(slot)
        self.num_proposer_errors += 1
        self._report(
            "proposer failed; the request goes on without drafts",
            request_id=self._request_ids[slot],
            error=f"{type(error).__name__}: {error}",
        )

    def _give_up_all(self, index: Index, error: Exception) -> None:
        """Propose no more for the requests in `index`."""
        for slot in index.tolist():
            if self._asks_proposer[slot] or self._asks_prediction[slot]:
                self._give_up(slot, error)

    def _end(self, proposer: Proposer, slot: int) -> None:
        """Let a proposer forget a request; one that fails in that is begun anew with the next."""
        try:
            proposer.end(slot)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  the request has ended, or has no drafts any more
            self.num_proposer_errors += 1
            self._report(
                "proposer failed to forget a request",
                request_id=self._request_ids[slot],
                error=f"{type(error).__name__}: {error}",
            )

    def _asks_nothing(self, slot: int) -> None:
        self._num_predicting -= int(self._asks_prediction[slot])
        self._num_asking -= int(self._asks_proposer[slot])
        self._asks_proposer[slot] = self._asks_prediction[slot] = False
        if not self._num_predicting:
            self._mutes_proposer = self._mutes_predictions = False
