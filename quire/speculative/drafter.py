"""Drafter: drafts for running requests, from their proposers, as many as the control chooses.

The scheduler's DraftSource. A request's predicted text is asked first, then the engine's proposer.
Proposers that only look up tokens are asked before the control chooses among what they found; one
that computes a model (CostlyProposer) is asked afterwards, for what the control chose. Always
holds: drafts are token ids of the model; a proposer that raises costs the request its drafts and
nothing else, unless the device of the model is lost; an error of any other part of speculation,
such as prices and control, ends drafts for all requests, and no answer.
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
# Steps of a rest of which the end is not known: until those without drafts have earned a trial.
UNTIL_EARNED = 1 << 30
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
        self._num_new = 0  # that began since what is known was doubted
        # Which slots had their last drafts from a prediction; None before one was asked.
        self.from_prediction: Bools | None = None
        # Which slots ask either proposer.
        self._asks_proposer = np.zeros(num_slots, np.bool_)
        self._asks_prediction = np.zeros(num_slots, np.bool_)

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
        self._asks_prediction[slot] = len(speculation.prediction_ids) > 0
        self._num_predicting += len(speculation.prediction_ids) > 0
        self._control.begin(slot, predicts=bool(self._asks_prediction[slot]))
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
        self, step_ms: float, gained_ms: float | None, computed_ms: float, num_steps: int = 1
    ) -> None:
        """See DraftSource."""
        balance = self._control.balance
        known_ms = self._caught_up_ms() if computed_ms > 0.0 else 0.0
        if balance is None or self.num_errors:
            return
        caught_up_ms = computed_ms
        if computed_ms > 0.0:  # all of it, where nothing was drafted
            caught_up_ms = computed_ms if gained_ms is None else min(known_ms, computed_ms)
            balance.caught_up(caught_up_ms)
        if gained_ms is None:
            balance.plain(step_ms, num_steps)
        elif gained_ms > 0.0 or not self._control.probes:
            balance.drafted(gained_ms, step_ms, computed_ms - caught_up_ms)
        self.notes_plain_steps = not balance.is_settled

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
        if self._num_predicting:
            return 0
        balance = self._control.balance
        if balance is not None and not balance.allows_drafts:
            return UNTIL_EARNED
        rests = self._control.rests
        return rests.quiet if rests.looks else rests.left

    def rested(self, num_steps: int) -> None:
        """See DraftSource."""
        rests = self._control.rests
        rests.left = max(rests.left - num_steps, 0)
        rests.until_look -= num_steps

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        """See DraftSource. What was found is doubted once as many began as run: beside many, one
        changes little."""
        if num_running == 1:
            self._control.rests.end_early()
        self._num_new += num_new
        if self._num_new < num_running:
            return
        self._num_new = 0
        self._control.rests.forget_misses()
        if self._control.balance is not None:
            self._control.balance.reconsider()

    def skips_step(self, tokens: TokenTable, able_slots: Callable[[], Index]) -> bool:
        """See DraftSource."""
        rests, balance = self._control.rests, self._control.balance
        if self.num_errors:
            return True
        if not self._num_predicting:
            if rests.left and (not rests.looks or rests.quiet):
                rests.left -= 1
                rests.until_look -= 1
                return True
            if balance is not None and not balance.allows_drafts:
                self.rested(1)
                return True
            if self._lookup is not None:
                try:
                    if rests.left:
                        finds = self._lookup.finds_long(tokens, None)
                        # Which slots can have drafts takes longer than to look at all.
                        finds = finds and self._finds_long(self._lookup, tokens, able_slots())
                        rests.note_look(finds=finds)
                        return not finds
                    if not self._lookup.may_find(tokens):
                        rests.note_miss(self._step_ms)
                        return True
                except Exception:  # noqa: BLE001  `propose` finds out for which request
                    return False
        return False

    def takes_plain_step(self) -> bool:
        """See DraftSource."""
        return self._control.rests.takes_plain_step()

    def would_propose(self, tokens: TokenTable, index: Index, limits: Int32s) -> Bools:
        """See DraftSource."""
        if self.rest_steps:
            return np.zeros(len(index), np.bool_)
        try:
            rests = self._control.rests
            if rests.left and not (self._num_predicting or self._may_find_long(tokens, index)):
                return np.zeros(len(index), np.bool_)
            drafts, may_compute = self._found(tokens, index, limits)
            limits = drafts.counts + may_compute
            # After a rest, or many refusals, the last costs may no longer hold: ask again.
            if rests.last or self._num_refused >= MAX_REFUSED:
                self._num_refused = 0
                return limits > 0
            pay = self._chosen(tokens, index, limits, drafts.matches, may_compute > 0, None) > 0
            if np.logical_or.reduce(limits):
                self._num_refused = 0 if np.logical_or.reduce(pay) else self._num_refused + 1
            return pay
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001  nothing waits for drafts
            self._lose(index, error)
            return np.zeros(len(index), np.bool_)

    def _may_find_long(self, tokens: TokenTable, slots: Index) -> bool:
        """Return whether drafts of a long match may be found for any of `slots`."""
        if self._lookup is None:
            return False
        try:
            return self._finds_long(self._lookup, tokens, slots)
        except Exception:  # noqa: BLE001  `propose` finds out for which request
            return True

    def _finds_long(self, lookup: LookupProposer, tokens: TokenTable, slots: Index) -> bool:
        """Return whether drafts of a long match are found for any of `slots`."""
        return lookup.finds_long(tokens, slots[self._asks_proposer[slots]])

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
        drafts, may_compute = self._found(tokens, index, limits)
        if self._costly is None:
            return self._looked_up(tokens, index, drafts, cost)
        is_computed = may_compute > 0
        limits = drafts.counts + may_compute
        counts = self._chosen(tokens, index, limits, drafts.matches, is_computed, cost)
        some = (is_computed & (counts > 0)).nonzero()[0]
        if len(some) and not self._control.is_informed:
            some = some[self._affordable(tokens, index[some])]
        drafts.counts[~is_computed] = counts[~is_computed]
        pays = len(some) > 0 or bool(np.logical_or.reduce(drafts.counts))
        self._note_choice(pays=pays)
        if len(some):
            made = no_drafts(len(some), self.max_drafts)
            predicted = cost()
            is_alone = predicted.step_tokens <= 1  # then it delays no other request
            share = math.inf if is_alone else CATCH_UP_SHARE
            self._costly.catch_up_ms = share * predicted.step_ms
            self._ask(self._proposer, tokens, index[some], counts[some], made)
            self.drafting_ms = self._costly.drafting_ms
            drafts.ids[some], drafts.counts[some] = made.ids, made.counts
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
        self.notes_plain_steps = not balance.is_settled
        return affordable

    def _looked_up(
        self, tokens: TokenTable, index: Index, drafts: Drafts, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """Return what of the `drafts` found pays; no model is computed."""
        self._control.rests.forget_misses()
        if not np.logical_or.reduce(drafts.counts):
            return drafts.counts, NO_INTS
        drafts.counts[:] = self._chosen(
            tokens, index, drafts.counts, drafts.matches, drafts.counts < 0, cost
        )
        are_long = has_long = False
        if self._control.rests.looks:
            is_long = drafts.matches >= LONG_MATCH
            are_long = not np.logical_or.reduce(drafts.counts * ~is_long)
            has_long = bool(np.logical_or.reduce(is_long))
        pays = bool(np.logical_or.reduce(drafts.counts))
        self._note_choice(pays=pays, are_long=are_long, has_long=has_long)
        return self._joined(drafts)

    def _note_choice(self, *, pays: bool, are_long: bool = False, has_long: bool = False) -> None:
        control = self._control
        control.rests.note_choice(
            pays=pays and not control.probes,
            step_ms=self._step_ms,
            asked_ms=self._asked_ms,
            speedup=control.speedup,
            are_long=are_long,
            has_long=has_long,
        )

    def _joined(self, drafts: Drafts) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of all, in order."""
        if not np.logical_or.reduce(drafts.counts):
            return drafts.counts, NO_INTS
        return drafts.counts, drafts.ids[np.arange(self.max_drafts) < drafts.counts[:, None]]

    def _found(self, tokens: TokenTable, index: Index, limits: Int32s) -> tuple[Drafts, Int32s]:
        """Return the drafts that are known without computing a model, and for requests that have
        none how many could be computed."""
        drafts = no_drafts(len(index), self.max_drafts)
        may_compute = np.zeros(len(index), np.int32)
        is_plain = self._costly is None and not self._num_predicting
        if is_plain and np.logical_and.reduce(self._asks_proposer[index]):  # all at once
            self._ask(self._proposer, tokens, index, limits, drafts)
            return drafts, may_compute
        for proposer, asks in self._proposers():
            some = (asks[index] & (limits > 0) & (drafts.counts == 0)).nonzero()[0]
            if not len(some):
                continue
            if proposer is self._costly:
                with ASKS_PROPOSER:
                    may_compute[some] = self._costly.possible(tokens, index[some], limits[some])
                continue
            found = no_drafts(len(some), self.max_drafts)
            self._ask(proposer, tokens, index[some], limits[some], found)
            for into, parts in zip(drafts, found, strict=True):
                into[some] = parts
            if proposer is self._prediction:
                self._note_predicted(index, index[some[found.counts > 0]])
        return drafts, may_compute

    def _note_predicted(self, index: Index, predicted: Index) -> None:
        """Note that of the drafts for slots `index` those of `predicted` come from predictions."""
        if self.from_prediction is None:
            self.from_prediction = np.zeros(len(self._asks_prediction), np.bool_)
        self.from_prediction[index] = False
        self.from_prediction[predicted] = True

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
            of_some = StepCost(
                predicted.step_ms,
                predicted.step_tokens,
                draft_ms,
                passes,
                self._control.rests.num_steps,
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
            if self._control.probes and np.logical_or.reduce(2 * accepted >= drafted):
                self._control.rests.note_success()
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
