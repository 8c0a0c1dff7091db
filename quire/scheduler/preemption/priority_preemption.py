"""PriorityPreemption: running requests yield to one that ranks before them.

In two ways. A row pauses: it is left out of a step so that the prompt of another is computed
sooner; it loses nothing, and the bits of an answer do not depend on the steps it is made in. A
request is preempted so that a waiting one gets its slot and its blocks. The policy decides which
requests yield to which. Always holds: of the rows that pause a few go on in each step, those that
have waited longest first, so none stalls; requests that are nearly finished, or were preempted
often enough, are not preempted in this way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.admission.slot_allocation import find_kv_source
from quire.scheduler.advance import Advance
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.policy.policy import NEARLY_FINISHED_TOKENS, Policy
from quire.scheduler.preemption.preemption_stats import PreemptionReason
from quire.scheduler.preemption.preemptor import Preemptor
from quire.scheduler.preemption.victims import MAX_PREEMPTIONS
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.step_budget import BlockShares

# Of rows that pause, one in so many goes on all the same.
ADVANCED_SHARE = 16


@dataclass(frozen=True, slots=True)
class PausedRows:
    """Rows left out of a step for the prompt of `sequence`.

    scheduled: how far that was scheduled before, -1 if it waited; layers_done: and by how many
    layers. sequences: those of the rows, with how often each had been preempted.
    """

    slots: list[int] = field(default_factory=list)
    sequence: SequenceState | None = None
    scheduled: int = -1
    layers_done: int = 0
    sequences: list[tuple[SequenceState, int]] = field(default_factory=list)

    def was_for(self, batch: RunningBatch) -> bool:
        """Return whether the prompt advanced in the step, now that it is put together."""
        sequence = self.sequence
        if sequence is None or sequence.slot == NO_SLOT:
            return False
        reached = int(batch.scheduled[sequence.slot]), sequence.layers_done
        return reached > (self.scheduled, self.layers_done)

    def others(self, batch: RunningBatch) -> list[int]:
        """Return running slots that are not, or no longer, of the paused rows."""
        slots = {
            sequence.slot
            for sequence, times in self.sequences
            if sequence.preemption.count == times
        }
        return [slot for slot in batch.active.tolist() if slot not in slots]


NO_PAUSED_ROWS = PausedRows()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptibleShare:
    """What others would give up for a waiting request.

    rows: that pause while its prompt is computed. slots: that it may take, and the blocks in them.
    """

    rows: int = 0
    slots: int = 0
    blocks: int = 0


NOTHING_PREEMPTIBLE = PreemptibleShare()


class PriorityPreemption(StepExtension):
    """Preemption under a policy that sets has_priority_preemption (priority, fair).

    is_pending: whether a request in flight is to be preempted in the next step.
    """

    is_active = limits_admission = True

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        policy: Policy,
        shares: BlockShares,
        preemptor: Preemptor,
        advance: Advance,
    ) -> None:
        self._requests = requests
        self._batch = batch
        self._cache = cache
        self._policy = policy
        self._tenants = shares
        self._preemptor = preemptor
        self._advance = advance
        self._paused_rows = NO_PAUSED_ROWS
        self.is_pending = False

    def begin_step(self, step: Step) -> None:
        """Preempt the requests that must yield their slot now, and pause rows for an urgent prompt.

        Requests that must yield but are in flight are paused, and preempted in the next step.
        """
        requests, self.is_pending, self._paused_rows = self._requests, False, NO_PAUSED_ROWS
        if not (requests.admission_is_due or self._policy.urgent):
            return
        first = requests.queue.first if requests.admission_is_due and len(requests.queue) else None
        if first is not None:
            in_flight = self._preempt_for(first)
            self.is_pending = bool(in_flight)
            step.paused += in_flight
        self._paused_rows = self._rows_to_pause(first)
        step.deferred += self._paused_rows.slots
        step.is_urgent = self._paused_rows is not NO_PAUSED_ROWS

    def allows_admission(self, step: Step, sequence: SequenceState) -> bool:
        """Return whether `sequence` begins beside the urgent prompt of this step."""
        urgent = self._paused_rows.sequence
        if urgent is None or not self._paused_rows.was_for(self._batch):
            return True
        return not self._policy.yields_to(sequence, urgent)

    def end_step(self, step: Step) -> None:
        """Schedule the paused rows after all where the urgent prompt has got nothing."""
        if self.is_pending:
            self._requests.admission_is_due = True
        if step.is_urgent and not self._paused_rows.was_for(self._batch):
            self._advance.advance(step, step.paused + self._paused_rows.others(self._batch))

    def preemptible_share(self, sequence: SequenceState) -> PreemptibleShare:
        """Return what the waiting `sequence` would get if it were next now."""
        policy, batch = self._policy, self._batch
        if not policy.has_priority_preemption or not policy.may_preempt(sequence):
            return NOTHING_PREEMPTIBLE
        slots = batch.active.tolist()
        running = (batch.sequence(slot) for slot in slots)
        yielding = sum(one.group is None and policy.yields_to(one, sequence) for one in running)
        may_go = (
            []
            if sequence.group is not None
            else [s for s in slots if self._may_be_preempted(s, sequence)]
        )
        return PreemptibleShare(
            rows=yielding - -(-yielding // ADVANCED_SHARE),
            slots=len(may_go),
            blocks=sum(map(self._cache.num_freed_by, may_go)),
        )

    def _rows_to_pause(self, first_waiting: SequenceState | None) -> PausedRows:
        """Return the rows that pause in this step, for a running prompt or the next one."""
        batch, policy = self._batch, self._policy
        sequence = policy.next_urgent(first_waiting)
        if sequence is None:
            return NO_PAUSED_ROWS
        sequences = [batch.sequence(slot) for slot in batch.active.tolist()]
        yielding = [
            one for one in sequences if one.group is None and policy.yields_to(one, sequence)
        ]
        # Rows without a token yet are NaN, and come last. Those that waited longest advance.
        waited = batch.last_token_ms[[one.slot for one in yielding]]
        shortest_waits = np.argsort(waited, kind="stable")[-(-len(yielding) // ADVANCED_SHARE) :]
        paused = [yielding[place] for place in shortest_waits.tolist()]
        if not paused:
            return NO_PAUSED_ROWS
        return PausedRows(
            slots=[one.slot for one in paused],
            sequence=sequence,
            scheduled=-1 if sequence.slot == NO_SLOT else int(batch.scheduled[sequence.slot]),
            layers_done=sequence.layers_done,
            sequences=[(one, one.preemption.count) for one in paused],
        )

    def _preempt_for(self, sequence: SequenceState) -> list[int]:
        """Preempt requests that yield to `sequence`, which is next and lacks a slot or blocks.

        Returns slots that are in flight: left out of this step, they can be preempted in the next.
        None is preempted where even all would not suffice.
        """
        batch, cache = self._batch, self._cache
        if sequence.group is not None or self._tenants.is_full(sequence):
            return []
        if not self._policy.may_preempt(sequence):
            return []
        slots = [slot for slot in batch.active.tolist() if self._may_be_preempted(slot, sequence)]
        if not slots:
            return []
        source = find_kv_source(sequence, cache, batch)
        active = batch.active
        room = cache.num_takeable(source.match) - self._tenants.reserved_for_others(sequence)
        room -= cache.blocks_lacking(active, batch.goal[active])
        room -= self._preemptor.watermark.blocks(len(active), self._requests.in_flight.step + 1)
        lacking = source.num_new_blocks - room
        if batch.free_slots and lacking <= 0:
            return []
        chosen: list[int] = []
        # Requests left out of the last step for this come before others again.
        for slot in sorted(
            self._preemptor.victims.victims(np.array(slots)).tolist(),
            key=self._requests.is_in_flight,
        ):
            chosen.append(slot)
            lacking -= cache.num_freed_by(slot)
            if lacking <= 0:
                break
        if lacking > 0:
            return []
        in_flight = [slot for slot in chosen if self._requests.is_in_flight(slot)]
        for slot in chosen:
            if slot not in in_flight:
                self._preemptor.preempt(slot, PreemptionReason.TURN)
        return in_flight

    def _may_be_preempted(self, slot: int, sequence: SequenceState) -> bool:
        """Return whether the request in `slot` may be preempted for `sequence`."""
        batch, running = self._batch, self._batch.sequence(slot)
        left = int(batch.longest[slot]) - int(batch.computed[slot])
        return (
            running.slot != NO_SLOT
            and running.group is None
            and left > NEARLY_FINISHED_TOKENS
            and running.preemption.count < MAX_PREEMPTIONS
            and self._policy.preempts(running, sequence)
            and self._tenants.may_lose_for(slot, sequence)
        )
