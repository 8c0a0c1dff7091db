"""ContinuedFirst: steps of their own for streams that continue, where many come at once.

Another engine has failed then, and each of its streams has been interrupted for as long as that
took to be noticed. A step with rows of all that run takes much longer than the rows of those that
continue, so the others stand back for a few steps and then go on. They come one by one, while an
API process accepts them, from which a step takes processor time: the next step waits until no more
come. A single request with output_ids changes nothing. Clients may send output_ids as well, so what
they can take from others is bounded.
Always holds: of MAX_IN_A_ROW + 1 steps one has the rows of all, and after MAX_STEPS without the
others these stand back once in STEPS_TO_EARN; no step waits for longer than MAX_GATHER_MS, and all
together for SHARE_TO_EARN of the time besides; a request stands back, or waits, for its own
tenant's only; where a running request has a target for the time between two tokens, none does.
"""

from __future__ import annotations

import math

import numpy as np

from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.in_flight import InFlightPlans
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.running_batch import Index, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState

# So many continue at once where an engine has failed, and hardly ever otherwise.
MIN_TOGETHER = 8
# How many steps in a row the others stand back.
MAX_IN_A_ROW = 3
# How many steps they stand back at once, as for a failed engine, and the steps that earn one more.
MAX_STEPS = 64
STEPS_TO_EARN = 16
# After a step that could compute fewer, for lack of blocks or because their prompts are long, they
# do not stand back for so many.
REST_STEPS = 16
# How long the next step waits for more of them, and the share of time that earns this.
MAX_GATHER_MS, SHARE_TO_EARN = 500.0, 1 / 8
# The longest wait for one more; no longer than a step of those that run.
MAX_GAP_MS = 50.0


class ContinuedFirst(StepExtension):
    """The streams of a scheduler that continue and have no output yet."""

    is_active = False

    def __init__(self, batch: RunningBatch, in_flight: InFlightPlans, speed: SpeedEstimate) -> None:
        self._batch, self._in_flight, self._speed = batch, in_flight, speed
        self._pending: list[SequenceState] = []
        self._num_in_a_row = self._num_to_rest = 0
        self._num_left, self._earned_until = MAX_STEPS, 0
        self._num_new = self._num_gathered = 0  # since the last step, and when more were waited for
        self._came_ms = self._asked_ms = 0.0  # when the newest of these were seen; the last call
        self._left_ms, self._gap_ms = MAX_GATHER_MS, 0.0

    def note(self, sequence: SequenceState) -> None:
        """Note a request that continues an answer."""
        self._pending.append(sequence)
        self._num_new += 1
        self.is_active = True

    def gather_s(self, now_ms: float) -> float:
        """Return for how long the next step waits for more requests that continue; 0: it does not.

        To be asked again when some have come, or after that time. Where plans overlap it never
        waits: their results would.
        """
        if self._num_new < MIN_TOGETHER or len(self._in_flight):
            return 0.0
        if not self._num_gathered:
            earned_ms = SHARE_TO_EARN * (now_ms - self._asked_ms)
            self._left_ms = min(self._left_ms + earned_ms, MAX_GATHER_MS)
            self._gap_ms = min(self._step_ms(), MAX_GAP_MS)
        elif self._gap_ms:
            self._left_ms -= now_ms - self._asked_ms
        self._asked_ms = now_ms
        if self._num_new > self._num_gathered:
            self._num_gathered, self._came_ms = self._num_new, now_ms
        wait_ms = min(self._came_ms + self._gap_ms - now_ms, self._left_ms)
        return max(wait_ms, 0.0) / 1000 if self._gap_ms else 0.0

    def begin_step(self, step: Step) -> None:
        """Leave out the others where enough of those that continue can be computed now."""
        self._num_new = self._num_gathered = 0
        self._pending = [
            one for one in self._pending if one.alive and math.isnan(one.times.first_token_ms)
        ]
        self.is_active = bool(self._pending)
        self._earn(step.builder.step)
        others = None
        if self._num_to_rest:
            self._num_to_rest -= 1
        elif self._num_in_a_row < MAX_IN_A_ROW and self._num_left:
            others = self._others()
        if others is None:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        self._num_left -= 1
        step.deferred += others

    def end_step(self, step: Step) -> None:
        """Note whether the step was worth it."""
        slots, batch = self._slots(), self._batch
        if self._num_in_a_row:
            num_rows = np.count_nonzero(batch.scheduled[slots] > batch.computed[slots])
            self._num_to_rest = 0 if num_rows >= MIN_TOGETHER else REST_STEPS

    def _earn(self, step: int) -> None:
        """Let the others stand back again for some of the steps since the last time."""
        num_earned = (step - self._earned_until) // STEPS_TO_EARN
        self._earned_until += num_earned * STEPS_TO_EARN
        self._num_left = min(self._num_left + num_earned, MAX_STEPS)

    @property
    def _able(self) -> list[SequenceState]:
        """The requests that continue and have no output yet, without paused ones."""
        return [one for one in self._pending if not one.is_held]

    def _slots(self) -> Index:
        """Return the slots of the able ones."""
        return np.array([one.slot for one in self._able if one.slot != NO_SLOT], np.intp)

    def _step_ms(self) -> float:
        """Return the predicted time of a step of all that run; 0 where one of them may not wait."""
        batch, slots = self._batch, self._slots()
        others = batch.active[~np.isin(batch.active, slots)]
        tenants = {one.request.tenant for one in self._able}
        if np.isfinite(batch.tpot_slo_ms[others]).any() or any(
            batch.sequence(slot).request.tenant not in tenants for slot in others.tolist()
        ):
            return 0.0
        return self._speed.step_ms(len(others), float(batch.computed[others].sum()))

    def _others(self) -> list[int] | None:
        """Return the slots that stand back; None for none, or where too few continue."""
        batch, active, able = self._batch, self._batch.active, self._able
        if len(able) < MIN_TOGETHER or not len(active):
            return None
        slots = self._slots()
        num_waiting = min(len(able) - len(slots), len(batch.free_slots))
        num_unscheduled = int(np.count_nonzero(batch.goal[slots] > batch.scheduled[slots]))
        if num_waiting + num_unscheduled < MIN_TOGETHER:
            return None
        others = active[~np.isin(active, slots)]
        if np.isfinite(batch.tpot_slo_ms[others]).any():
            return None
        tenants = {one.request.tenant for one in able}
        found = ((slot, batch.sequence(slot)) for slot in others.tolist())
        slots_of_tenants = [
            slot for slot, one in found if one.group is None and one.request.tenant in tenants
        ]
        return slots_of_tenants or None
