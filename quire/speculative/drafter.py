"""Drafter: drafts for running requests, from their proposers, as many as the control chooses.

The scheduler's DraftSource. A request's predicted text is asked first, then the engine's proposer.
Proposers that only look up tokens are asked before the control chooses among what they found; one
that computes a model (CostlyProposer) is asked afterwards, for what the control chose. Always
holds: drafts are token ids of the model; a proposer that raises costs the request its drafts and
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS, Request
from quire.base.report import Report
from quire.base.token_table import TokenTable
from quire.speculative.control import Control, Passes, StepCost
from quire.speculative.proposer import CostlyProposer, Drafts, Proposer, no_drafts

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
Cost = Callable[[], "PredictedCost"]
# Where no draft pays, the control is asked again after 1, 2, 4, ... steps up to so many; and when
# another request begins beside others, after so many at most.
MAX_REST_STEPS = 16
FEW_REST_STEPS = 2
# While texts repeat nothing, lookups rest a step longer after so many that found nothing, and at
# most so long: a repetition of a few tokens would be missed otherwise.
EMPTY_PER_REST_STEP = 8
MAX_EMPTY_REST_STEPS = 3
# Of so many steps with drafts in turn, one has none: what drafts add to a step is judged against
# steps without. The first comes sooner.
STEPS_PER_PLAIN = 64
STEPS_BEFORE_PLAIN = 1
# How long a draft model may catch up with prompts in a step, in times of the step.
CATCH_UP_SHARE = 0.5
# Over so many drafts the cost of catching up with a request is spread when the control decides.
DRAFTS_PER_CATCH_UP = 64.0


class PredictedCost(Protocol):
    """The scheduler's DraftCost; see StepCost."""

    @property
    def step_ms(self) -> float: ...

    @property
    def step_tokens(self) -> int: ...

    @property
    def draft_ms(self) -> NDArray[np.float64]: ...

    @property
    def once_ms(self) -> float: ...

    @property
    def row_ms(self) -> float: ...


class Drafter:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step.

    proposer: of the engine. prediction: proposes from the texts that requests bring. report:
    receives the errors of proposers.
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
        self.max_drafts = max_drafts
        self._proposer, self._prediction = proposer, prediction
        self._costly = proposer if isinstance(proposer, CostlyProposer) else None
        self._control, self._report, self._vocab_size = control, report, vocab_size
        self._request_ids = [""] * num_slots
        self._rest_steps = self._resting = 0  # of the present rest: how long, and what is left
        self._num_empty = 0  # lookups in turn that found nothing
        self._until_plain = STEPS_BEFORE_PLAIN
        self._num_predicting = 0  # requests that bring a prediction
        # Which slots ask either proposer.
        self._asks_proposer = np.zeros(num_slots, np.bool_)
        self._asks_prediction = np.zeros(num_slots, np.bool_)

    @property
    def drafting_ms(self) -> float:
        """Return the milliseconds that computing drafts took so far."""
        return 0.0 if self._costly is None else self._costly.drafting_ms

    def close(self) -> None:
        """Free what the proposer holds."""
        if self._costly is not None:
            self._costly.close()

    def begin(self, slot: int, request: Request) -> None:
        """See DraftSource."""
        speculation = request.speculation
        assert speculation is not None, "only requests that speculate begin"
        self._request_ids[slot] = request.request_id
        is_alone = not (self._asks_proposer.any() or self._num_predicting)
        most = 0 if is_alone else FEW_REST_STEPS
        self._rest_steps, self._resting = min(self._rest_steps, most), min(self._resting, most)
        self._num_empty = 0
        self._asks_proposer[slot] = speculation.uses_proposer
        self._asks_prediction[slot] = len(speculation.prediction_ids) > 0
        self._num_predicting += len(speculation.prediction_ids) > 0
        self._control.begin(slot, predicts=bool(self._asks_prediction[slot]))
        for proposer, asks in self._proposers():
            if asks[slot]:
                try:
                    proposer.begin(slot, request)
                except Exception as error:  # noqa: BLE001  of whatever proposes: no draft, no harm
                    self._give_up(slot, error)

    def end(self, slot: int) -> None:
        """See DraftSource."""
        for proposer, asks in self._proposers():
            if asks[slot]:
                proposer.end(slot)
        self._asks_nothing(slot)

    def skips_step(self) -> bool:
        """See DraftSource."""
        if not self._until_plain:
            self._until_plain = STEPS_PER_PLAIN
            return True
        if not self._resting or self._num_predicting:
            return False
        self._resting -= 1
        return True

    def would_propose(self, tokens: TokenTable, index: Index, limits: Int32s) -> Bools:
        """See DraftSource."""
        if self._resting and not self._num_predicting:
            return np.zeros(len(index), np.bool_)
        drafts, may_compute = self._found(tokens, index, limits)
        limits = drafts.counts + may_compute
        if self._rest_steps:  # the last costs, which did not pay, may no longer hold: ask again
            return limits > 0
        counts = self._chosen(tokens, index, limits, may_compute > 0, None)
        return counts > 0

    def propose(
        self, tokens: TokenTable, index: Index, limits: Int32s, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """See DraftSource."""
        drafts, may_compute = self._found(tokens, index, limits)
        if self._costly is None:
            return self._looked_up(tokens, index, drafts, cost)
        is_computed = may_compute > 0
        counts = self._chosen(tokens, index, drafts.counts + may_compute, is_computed, cost)
        self._note_choice(pays=bool(counts.any()))
        drafts.counts[~is_computed] = counts[~is_computed]
        some = (is_computed & (counts > 0)).nonzero()[0]
        if len(some):
            made = no_drafts(len(some), self.max_drafts)
            predicted = cost()
            is_alone = predicted.step_tokens <= 1  # then it delays no other request
            share = math.inf if is_alone else CATCH_UP_SHARE
            self._costly.catch_up_ms = share * predicted.step_ms
            self._ask(self._proposer, tokens, index[some], counts[some], made)
            drafts.ids[some], drafts.counts[some] = made
        return self._joined(drafts)

    def _looked_up(
        self, tokens: TokenTable, index: Index, drafts: Drafts, cost: Cost
    ) -> tuple[Int32s, Int32s]:
        """Return what of the `drafts` found pays; no model is computed."""
        if not np.count_nonzero(drafts.counts):
            self._num_empty += 1
            longest = min(self._num_empty // EMPTY_PER_REST_STEP, MAX_EMPTY_REST_STEPS)
            self._resting = max(self._resting, longest)
            return drafts.counts, NO_INTS
        self._num_empty = 0
        drafts.counts[:] = self._chosen(tokens, index, drafts.counts, drafts.counts < 0, cost)
        self._note_choice(pays=bool(drafts.counts.any()))
        return self._joined(drafts)

    def _joined(self, drafts: Drafts) -> tuple[Int32s, Int32s]:
        """Return the counts and the drafts of all, in order."""
        if not drafts.counts.any():
            return drafts.counts, NO_INTS
        return drafts.counts, drafts.ids[np.arange(self.max_drafts) < drafts.counts[:, None]]

    def _note_choice(self, *, pays: bool) -> None:
        """Rest where no draft pays, longer each time; let a step without drafts come at times."""
        if pays:
            self._rest_steps = self._resting = 0
            self._until_plain -= 1
        else:
            self._rest_steps = self._resting = min(max(2 * self._rest_steps, 1), MAX_REST_STEPS)
            self._until_plain = STEPS_PER_PLAIN

    def _found(self, tokens: TokenTable, index: Index, limits: Int32s) -> tuple[Drafts, Int32s]:
        """Return the drafts that are known without computing a model, and for requests that have
        none how many could be computed."""
        drafts = no_drafts(len(index), self.max_drafts)
        may_compute = np.zeros(len(index), np.int32)
        if self._costly is None and not self._num_predicting and self._asks_proposer[index].all():
            self._ask(self._proposer, tokens, index, limits, drafts)  # the plain case: all at once
            return drafts, may_compute
        for proposer, asks in self._proposers():
            some = (asks[index] & (limits > 0) & (drafts.counts == 0)).nonzero()[0]
            if not len(some):
                continue
            if proposer is self._costly:
                may_compute[some] = self._costly.possible(tokens, index[some], limits[some])
                continue
            found = no_drafts(len(some), self.max_drafts)
            self._ask(proposer, tokens, index[some], limits[some], found)
            drafts.ids[some], drafts.counts[some] = found
        return drafts, may_compute

    def _chosen(
        self,
        tokens: TokenTable,
        index: Index,
        limits: Int32s,
        is_computed: Bools,
        cost: Cost | None,
    ) -> Int32s:
        """Return how many of limits[i] drafts pay, those of rows `is_computed` with their making.

        cost: None: as in the last step.
        """
        some = limits.nonzero()[0]
        if not len(some):
            return limits
        of_some = None
        if cost is not None:
            passes, predicted = None, cost()
            draft_ms = predicted.draft_ms[some]
            if self._costly is not None:
                rows = is_computed[some]
                passes = Passes(self._costly.pass_ms(int(np.count_nonzero(rows))), rows)
                behind_ms = self._costly.behind_ms(tokens, index[some])
                draft_ms = draft_ms + rows * behind_ms / DRAFTS_PER_CATCH_UP
            of_some = StepCost(
                predicted.step_ms,
                predicted.step_tokens,
                draft_ms,
                passes,
                1 + self._rest_steps,
                predicted.once_ms,
                predicted.row_ms,
            )
        counts = np.zeros(len(index), np.int32)
        counts[some] = self._control.limits(index[some], limits[some], of_some)
        return counts

    def verified(self, index: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See DraftSource."""
        self._control.verified(index, drafted, accepted)
        for proposer, asks in self._proposers():
            some = asks[index]
            if some.all():
                proposer.verified(index, drafted, accepted)
            elif some.any():
                proposer.verified(index[some], drafted[some], accepted[some])

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
        except Exception as error:  # noqa: BLE001  see above
            found.counts[:] = 0
            if len(slots) == 1:
                self._give_up(int(slots[0]), error)
                return
            for at in range(len(slots)):
                one = slice(at, at + 1)
                part = Drafts(found.ids[one], found.counts[one])
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
                proposer.end(slot)
        self._asks_nothing(slot)
        self._report(
            "proposer failed; the request goes on without drafts",
            request_id=self._request_ids[slot],
            error=f"{type(error).__name__}: {error}",
        )

    def _asks_nothing(self, slot: int) -> None:
        self._num_predicting -= int(self._asks_prediction[slot])
        self._asks_proposer[slot] = self._asks_prediction[slot] = False
