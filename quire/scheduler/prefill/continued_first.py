"""ContinuedFirst: steps of their own for streams that continue, where many come at once.

Another engine has failed then, and each of its streams has been interrupted for as long as that
took to be noticed. A step with rows of all that run takes much longer than the rows of those that
continue, and the API process, which still has to accept most of them, must pass on a token of each
row. So the others stand back for some steps and then go on. Requests that continue arrive a few at
a time: while MIN_TOGETHER have come within TOGETHER_STEPS, one is enough for such a step. A single
request with output_ids changes nothing. Clients may send output_ids as well, so what they can take
from others is bounded in steps, of which one with few tokens counts as MIN_SHARE of a full one.
Always holds: after MAX_IN_A_ROW full steps without the others, one has the rows of all; after
MAX_STEPS there is one more for each STEPS_TO_EARN; a request stands back for its own tenant's only;
where a running request has a target for the time between two tokens, none stands back.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.running_batch import Index, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState

# So many continue at once where an engine has failed, and hardly ever otherwise.
MIN_TOGETHER = 8
# How many steps in a row the others stand back.
MAX_IN_A_ROW = 3.0
# How many steps they stand back at once, as for a failed engine, and the steps that earn one more.
MAX_STEPS = 64.0
STEPS_TO_EARN = 16
# A step counts as its tokens' share of the most that a step may have, and as this at least.
MIN_SHARE = 0.25
# After a step that could compute less than half of them or of MIN_TOGETHER, for lack of blocks or
# because their prompts are long, they do not stand back for so many.
REST_STEPS = 16
# So many steps after one another those of a failed engine come.
TOGETHER_STEPS = 8


class ContinuedFirst(StepExtension):
    """The streams of a scheduler that continue and have no output yet."""

    is_active = False

    def __init__(self, batch: RunningBatch, max_step_tokens: int) -> None:
        self._batch, self._max_step_tokens = batch, max_step_tokens
        self._pending: list[SequenceState] = []
        self._is_own = False  # this step is
        self._in_a_row = 0.0
        self._num_to_rest = 0
        self._left, self._earned_until = MAX_STEPS, 0
        self._num_new = 0  # since the last step
        self._came: deque[int] = deque(maxlen=MIN_TOGETHER)  # the steps before which the last came
        self._num_wanted = 0  # rows of those that continue, in this step

    def note(self, sequence: SequenceState) -> None:
        """Note a request that continues an answer."""
        self._pending.append(sequence)
        self._num_new += 1
        self.is_active = True

    def begin_step(self, step: Step) -> None:
        """Leave out the others where enough of those that continue can be computed now."""
        self._came.extend([step.builder.step] * min(self._num_new, MIN_TOGETHER))
        self._num_new = 0
        self._pending = [
            one for one in self._pending if one.alive and math.isnan(one.times.first_token_ms)
        ]
        self.is_active = bool(self._pending)
        self._earn(step.builder.step)
        others = None
        if self._num_to_rest:
            self._num_to_rest -= 1
        elif self._in_a_row < MAX_IN_A_ROW and self._left > 0:
            others = self._others(step.builder.step)
        self._is_own = others is not None
        if others is None:
            self._in_a_row = 0.0
        else:
            step.deferred += others

    def end_step(self, step: Step) -> None:
        """Note what the step took, and whether it was worth it."""
        if not self._is_own:
            return
        index, _, starts, counts, *_ = step.builder.joined_rows()
        continues = np.isin(index, self._slots())
        share = max(float(counts[continues].sum()) / self._max_step_tokens, MIN_SHARE)
        self._in_a_row += share
        self._left -= share
        num_rows = np.count_nonzero(continues & (starts < self._batch.tokens.lengths[index]))
        self._num_to_rest = 0 if 2 * num_rows >= self._num_wanted else REST_STEPS

    def _earn(self, step: int) -> None:
        """Let the others stand back again for some of the steps since the last time."""
        num_earned = (step - self._earned_until) // STEPS_TO_EARN
        self._earned_until += num_earned * STEPS_TO_EARN
        self._left = min(self._left + num_earned, MAX_STEPS)

    def _slots(self) -> Index:
        """Return the slots of those that continue and have no output yet."""
        return np.array([one.slot for one in self._pending if one.slot != NO_SLOT], np.intp)

    def _others(self, step: int) -> list[int] | None:
        """Return the slots that stand back; None for none, or where too few continue."""
        batch, active = self._batch, self._batch.active
        are_many = len(self._came) == MIN_TOGETHER and step - self._came[0] < TOGETHER_STEPS
        num_needed = 1 if are_many else MIN_TOGETHER
        if len(self._pending) < num_needed or not len(active):
            return None
        slots = self._slots()
        num_waiting = min(len(self._pending) - len(slots), len(batch.free_slots))
        # Where all known tokens are in plans in flight, the first output is on its way.
        num_unscheduled = int(
            np.count_nonzero(batch.tokens.lengths[slots] > batch.scheduled[slots])
        )
        self._num_wanted = min(num_waiting + num_unscheduled, MIN_TOGETHER)
        if self._num_wanted < num_needed:
            return None
        others = active[~np.isin(active, slots)]
        if np.isfinite(batch.tpot_slo_ms[others]).any():
            return None
        tenants = {one.request.tenant for one in self._pending}
        found = ((slot, batch.sequence(slot)) for slot in others.tolist())
        slots_of_tenants = [
            slot for slot, one in found if one.group is None and one.request.tenant in tenants
        ]
        return slots_of_tenants or None
