"""Preemptor: takes slots from running requests, for others or because their tenant has too much.

Combines the order of victims with what losing a slot means: back to the queue, with all tokens
known. Always holds: generated tokens are kept, so a preempted request goes on as if nothing had
happened; a group of beams goes as a whole; no request named by a plan in flight is preempted.
"""

from __future__ import annotations

import numpy as np

from quire.base.timeline import EventKind
from quire.cache.manager import CacheManager
from quire.scheduler.admission.admitter import Watermark
from quire.scheduler.beam.beam_groups import BeamGroups
from quire.scheduler.preemption.make_room import make_room
from quire.scheduler.preemption.preemption_stats import PreemptionReason, PreemptionStats
from quire.scheduler.preemption.victims import Victims
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceGroup, SequenceState
from quire.scheduler.step_budget import BlockShares


class Preemptor:
    """Preempts running requests of one scheduler. stats: how many, why, and at what cost."""

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        shares: BlockShares,
        beams: BeamGroups,
        *,
        victims: Victims,
        watermark: Watermark,
        stats: PreemptionStats,
    ) -> None:
        self._requests = requests
        self._batch = batch
        self._cache = cache
        self._tenants = shares
        self._beams = beams
        self.victims = victims
        self.watermark = watermark
        self.stats = stats

    def in_order(self, index: Index) -> Index:
        """Return the places in `index`, slots of running requests, in the order of service."""
        sequences = [self._batch.sequence(slot) for slot in index.tolist()]
        keys = [(sequence.entry.key, sequence.arrival) for sequence in sequences]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)

    def make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Return which of the rows of slots `index` may go on, after preempting others.

        Served in the policy's order. over: the rows that lack blocks, needs: how many.
        """
        batch = self._batch
        all_needs = np.zeros(len(index), np.int32)
        all_needs[over] = needs
        order = self.in_order(index)
        in_prompts = batch.scheduled[index[over]] < batch.tokens.prompt_lengths[index[over]]
        why = PreemptionReason.PROMPT if in_prompts.any() else PreemptionReason.ANSWER
        self._beams.sum_needs(index, all_needs)
        order = order[self._beams.last_rows(index[order])]
        goes_on = np.zeros(len(index), np.bool_)
        goes_on[order] = make_room(
            index[order],
            all_needs[order],
            cache=self._cache,
            victims=self.victims.victims,
            tenants=self._tenants,
            in_flight=self._requests.last_steps(index[order]) > 0,
            preempt=lambda slot: self.preempt(slot, why),
        )
        self._beams.share_decision(index, goes_on)
        return goes_on

    def keep_ceilings(self) -> list[int]:
        """Preempt the last requests of tenants that have grown beyond their ceilings.

        Returns slots that are in flight: they are left out of this step, and preempted then.
        """
        paused: list[int] = []
        for tenant, slots in self._tenants.above_ceilings():
            served = slots[self.in_order(slots)]
            served = served[self._beams.last_rows(served)]
            for slot in self.victims.by_policy(served[1:]).tolist():
                if not self._tenants.is_above_ceiling(tenant):
                    break
                if self._requests.last_steps(np.array([slot]))[0]:
                    paused.append(slot)
                else:
                    self.preempt(slot, PreemptionReason.CEILING)
        return paused

    def preempt(self, slot: int, why: PreemptionReason = PreemptionReason.ANSWER) -> None:
        """Put the request in `slot` back into the queue, with all tokens known.

        What was computed may still be found there, or is loaded from a tier.
        """
        sequence = self._batch.sequence(slot)
        if sequence.group is not None:
            self._preempt_group(sequence.group, why)
            return
        moved = self._pack(slot, sequence)
        self.stats.preempted(why, moved=moved)
        self.watermark.preempted(self._requests.in_flight.step)
        self._note(sequence, EventKind.PREEMPTED, known=int(moved), detail=why.value)
        sequence.preemption.had_computed = int(self._batch.computed[slot])
        sequence.preemption.count += 1
        self._requests.release([slot])
        self._requests.enqueue(sequence)

    def set_aside(self, slot: int) -> None:
        """Take a paused request out of `slot` as a preempted one; it does not count as one."""
        sequence = self._batch.sequence(slot)
        self._note(sequence, EventKind.PAUSED)
        self._pack(slot, sequence)
        self._requests.release([slot])

    def _note(
        self, sequence: SequenceState, kind: EventKind, *, known: int = 0, detail: str = ""
    ) -> None:
        """Note in the history of `sequence` that it leaves its slot after the last plan sent."""
        requests = self._requests
        step = requests.in_flight.step
        sequence.history.note(requests.now_ms, kind, step=step, known=known, detail=detail)

    def _pack(self, slot: int, sequence: SequenceState) -> bool:
        """Keep what a request needs to go on from another slot.

        Returns whether its blocks are moved to a tier, because that is the cheaper way back.
        """
        batch, index = self._batch, np.array([slot], np.intp)
        _, moved = self.victims.return_ms(slot)
        if moved:
            self._cache.register(index, batch.computed[index], batch.tokens.tokens)
            self._cache.swap_out(slot)
        sequence.token_ids = batch.tokens.tokens[slot, : batch.tokens.lengths[slot]].copy()
        sequence.chain = None
        if (
            sequence.request.sampling.mirostat
            and len(sequence.token_ids) > sequence.num_prompt_tokens
        ):
            sequence.preemption.mirostat_mu = float(batch.mirostat_mus[slot])
        return moved

    def _preempt_group(self, group: SequenceGroup, why: PreemptionReason) -> None:
        """Preempt a group as a whole; its first member waits for all."""
        slots, first = group.slots, group.members[0]
        self.stats.preempted(why, moved=False)
        self.watermark.preempted(self._requests.in_flight.step)
        self._note(first, EventKind.PREEMPTED, detail=why.value)
        first.preemption.had_computed = int(self._batch.computed[first.slot])
        group.pack()
        first.preemption.count += 1
        self._requests.release(slots)
        self._beams.release(group)
        self._requests.enqueue(first)
