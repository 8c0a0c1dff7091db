"""Advance: the next rows of the running requests, and the blocks these need.

Hands a step's budget to running requests, gives blocks to those that outgrow theirs, and has
others preempted where blocks run short. Always holds: a row is scheduled only with blocks for all
it stores; tokens that a row was allotted and cannot use are given back to the budget.
"""

from __future__ import annotations

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.interfaces import BlockLoads, Layered, Preemption, Prompts
from quire.scheduler.plan_builder import Step
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.step_budget import BlockShares


class Advance:
    """Give the running requests of a scheduler their next rows."""

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        shares: BlockShares,
        preemptor: Preemption,
        prompts: Prompts,
        layered: Layered,
        loads: BlockLoads,
    ) -> None:
        self._requests = requests
        self._batch = batch
        self._cache = cache
        self._shares = shares
        self._preemptor = preemptor
        self._prompts = prompts
        self._layered = layered
        self._loads = loads

    def advance(self, step: Step, paused: list[int], *, by_key: bool = False) -> None:
        """Schedule the running requests except those in slots `paused`.

        Notes in `step` whether blocks ran short, and which prompts yield to waiting ones. by_key:
        strictly in the order of keys.
        """
        batch, cache, budget = self._batch, self._cache, step.budget
        index, slots = batch.active, batch.active_slots
        if paused:
            advances = ~np.isin(index, paused)
            index, slots = index[advances], slots[advances]
        starts, goals = batch.scheduled[index], batch.goal[index]
        scored = batch.still_scored(index, starts)
        if by_key:
            counts = self._by_key(step, index, starts, goals - starts, scored)
        else:
            counts = self._allot(step, index, starts, goals - starts, scored)
        ends = starts + counts
        advances = counts > 0
        by_layers = self._layered.row(index) if self._layered.is_active and not by_key else None
        over = (ends > cache.capacities[index]).nonzero()[0]
        if len(over):
            needs = cache.blocks_short(index[over], ends[over])
            if not self.has_room(index[over], needs):
                step.has_room = False
                may = self._preemptor.make_room(index, over, needs)
                unused = ~may
                if by_layers is not None:
                    unused[by_layers] = False  # it was allotted none of the step's rows
                budget.give_back(
                    starts[unused], counts[unused], None if scored is None else scored[unused]
                )
                advances &= may
                over, needs = over[may[over]], needs[may[over]]
                step.yielding = [one for one in step.yielding if one.slot != NO_SLOT]
            if len(over):
                step.builder.add_deltas(cache.allocate(index[over], needs))
        if by_layers is not None and advances[by_layers]:
            self._layered.send(step.builder)
            advances[by_layers] = False
        num_rows = np.count_nonzero(advances)
        if num_rows < len(index):
            index, slots, starts = index[advances], slots[advances], starts[advances]
            goals, counts, ends = goals[advances], counts[advances], ends[advances]
        if num_rows:
            sample_counts = batch.schedule(index, ends, goals)
            store_from = np.maximum(starts, batch.stored[index])
            step.builder.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)

    def has_room(self, index: Index, needs: Int32s) -> bool:
        """Return whether needs[i] blocks are free for slots index[i], once kept ones are released.

        Blocks that are kept for waiting requests never count against running ones.
        """
        if self._shares.can_grow(index, needs):
            return True
        return (
            self._loads.any_used
            and self._loads.release_kept()
            and self._shares.can_grow(index, needs)
        )

    def make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Preempt for rows `over` of slots `index`; return which rows may advance."""
        return self._preemptor.make_room(index, over, needs)

    def _by_key(
        self, step: Step, index: Index, starts: Int32s, wanted: Int32s, scored: Bools | None
    ) -> Int32s:
        """Return tokens for the rows of slots `index`, strictly in the order of keys."""
        order, counts = self._preemptor.in_order(index), np.zeros(len(index), np.int32)
        of_scored = None if scored is None else scored[order]
        counts[order] = step.budget.allot(starts[order], wanted[order], of_scored)
        return counts

    def _allot(
        self, step: Step, index: Index, starts: Int32s, wanted: Int32s, scored: Bools | None
    ) -> Int32s:
        """Return tokens for the rows of slots `index`."""
        if not np.count_nonzero(wanted > 1):
            return step.budget.allot(starts, wanted, scored)
        queue = self._requests.queue
        first: SequenceState | None = None
        if self._requests.admission_is_due and len(queue):
            first = queue.first
        return self._prompts.allot(step, index, starts, wanted, scored, first, len(queue))
