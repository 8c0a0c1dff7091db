"""BackgroundRows: requests in the background compute in what capacity others leave.

While other requests run, those in the background share SHARE of the predicted time of the others'
steps: each such step adds to an allowance, and a row runs when the allowance has its price. On a
device on which a further row costs next to nothing all of them advance; where each row costs a good
part of a step, one now and then. While only such requests live, steps are kept short, so that a
request that arrives waits for a short step. Reads no clock: prices are those that the scheduler
learns. Others that are paused for their client count as ended. Always holds: a step without rows of
others goes to the background, so it is never stuck behind requests that wait; with no such request
live none of this runs.
"""

from __future__ import annotations

import numpy as np

from quire.base.timeline import WaitReason
from quire.scheduler.advance import Advance
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.preemption.backpressure import Backpressure
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Index, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.step_budget import MIN_PROMPT_TOKENS, StepBudget

# What background rows may add to the time of other requests.
SHARE = 0.03
# The longest step of background rows alone, as a multiple of what the smallest step takes.
MAX_STEP_SIZE = 2.0
# The most that the allowance grows to: what a row costs at most beside others, however long.
MAX_ALLOWANCE_MS = 500.0


class BackgroundRows(StepExtension):
    """A scheduler's extension, and a Gate: a request waits while its prompt is not affordable."""

    is_active = False
    until_event = False
    reason = WaitReason.BACKGROUND

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        speed: SpeedEstimate,
        advance: Advance,
        backpressure: Backpressure,
    ) -> None:
        self._requests, self._batch = requests, batch
        self._speed, self._advance, self._backpressure = speed, advance, backpressure
        self._live: list[SequenceState] = []
        self._slots: frozenset[int] = frozenset()  # of these, as of the beginning of the step
        self._is_beside = False  # others live, so that these are paused
        self.allowance_ms = 0.0

    def note(self, sequence: SequenceState) -> None:
        """Note a request in the background that has arrived."""
        self._live.append(sequence)
        self.is_active = True

    def begin_step(self, step: Step) -> None:
        """Pause the rows of the background where others live; else keep the step short."""
        self._live = [sequence for sequence in self._live if sequence.alive]
        self.is_active = bool(self._live)
        num_paused = sum(not one.request.background for one in self._backpressure.held)
        self._is_beside = len(self._live) < len(self._requests.sequences) - num_paused
        slots = frozenset(slot for one in self._live for slot in _slots_of(one))
        price = self._speed.latest
        if self._is_beside:
            for slot in slots - self._slots:  # admitted in the last step
                tokens = len(self._batch.sequence(slot).token_ids)
                self.allowance_ms -= price.row_ms(0, tokens)
            step.paused += sorted(slots)
        else:
            most = price.max_tokens(0, (MAX_STEP_SIZE - 1.0) * price.fixed_ms)
            most = max(most, MIN_PROMPT_TOKENS, len(slots))
            step.budget.tokens = min(step.budget.tokens, most)
        self._slots = slots

    def end_step(self, step: Step) -> None:
        """Give the paused rows what the allowance pays for.

        Without any row the step is left to the scheduler, which then lets the first by key advance.
        """
        if not self._is_beside:
            return
        if not step.builder.has_rows and not len(self._requests.in_flight):
            step.paused = [slot for slot in step.paused if slot not in self._slots]
            return
        earned_ms = SHARE * self._speed.latest.fixed_ms
        self.allowance_ms = min(self.allowance_ms + earned_ms, MAX_ALLOWANCE_MS)
        index, tokens = self._affordable(np.array(sorted(self._slots), np.intp))
        tokens = min(tokens, step.budget.tokens)
        if not len(index) or tokens < 1:
            return
        batch, left = self._batch, step.budget
        others = batch.active[~np.isin(batch.active, index)]
        step.budget = StepBudget(tokens, 0.0, None)
        self._advance.advance(step, others.tolist(), by_key=True)
        left.tokens -= tokens - step.budget.tokens
        step.budget = left

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether a waiting request must wait: others run, and its prompt costs too much."""
        if not sequence.request.background or len(self._slots) >= len(batch.active):
            return False
        price_ms = self._speed.latest.row_ms(0, len(sequence.token_ids))
        return self.allowance_ms < min(price_ms, MAX_ALLOWANCE_MS)

    def _affordable(self, index: Index) -> tuple[Index, int]:
        """Return which of the paused slots advance beside others, and their tokens in all."""
        batch, price = self._batch, self._speed.latest
        chosen: list[int] = []
        tokens = 0
        for slot in index.tolist():
            if batch.sequence(slot).group is not None:
                continue  # beams advance together
            start = int(batch.scheduled[slot])
            count = min(int(batch.goal[slot]) - start, MIN_PROMPT_TOKENS)
            cost_ms = price.row_ms(start, count) + price.score_ms
            if count > 0 and cost_ms <= self.allowance_ms:
                self.allowance_ms -= cost_ms
                chosen.append(slot)
                tokens += count
        return np.array(chosen, np.intp), tokens


def _slots_of(sequence: SequenceState) -> list[int]:
    """Return the slots that a request has, those of its beams included."""
    if sequence.group is not None:
        return list(sequence.group.slots)
    return [] if sequence.slot == NO_SLOT else [sequence.slot]
