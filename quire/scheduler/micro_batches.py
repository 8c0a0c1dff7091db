"""MicroBatches: divides the requests that generate over the plans in flight of a pipeline.

A stage computes one plan while the next stage computes another, so a request has a row in one of
them only: its next row needs the token that its last one samples. Each plan therefore takes its
share of the requests that generate, and leaves the others to the plans beside it. Chunks of a
prompt need no token, and follow each other through the stages.

Exists only where stages compute several plans at once. Knows no stages and no executor. Always
holds: no plan has a row of which an earlier plan in flight samples the input; a beam search keeps
its rows together; requests are left to other plans only while this one has rows.
"""

from __future__ import annotations

from quire.scheduler.interfaces import Preemption, StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.running_batch import RunningBatch


class MicroBatches(StepExtension):
    """Divide the requests of a scheduler over its plans in flight."""

    is_active = True

    def __init__(self, batch: RunningBatch, preemption: Preemption, num_plans: int) -> None:
        self._batch, self._preemption, self._num_plans = batch, preemption, num_plans

    def begin_step(self, step: Step) -> None:
        """Leave out requests with a token in flight, and those beyond the plan's share."""
        batch, active = self._batch, self._batch.active
        if not len(active):
            return
        scheduled = batch.scheduled[active]
        waits = scheduled >= batch.tokens.lengths[active]
        generates = waits | (batch.goal[active] - scheduled == 1)
        share = -(-int(generates.sum()) // self._num_plans)
        step.paused += active[waits].tolist()
        ready = active[generates & ~waits]
        if len(ready) > share:
            later = ready[self._preemption.in_order(ready)[share:]].tolist()
            step.deferred += [slot for slot in later if batch.sequence(slot).group is None]
