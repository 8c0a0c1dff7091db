"""Admission: waiting requests get slots, blocks and their first tokens of budget.

Knows the queue's order, gates, placements and what must stay free for those that run. Preempts
nobody. Always holds: a request is admitted only if the blocks for all its known tokens are free
beside those that running requests still need for theirs; who is blocked blocks those behind it,
so nobody is overtaken but by those a gate lets pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.base.records import Admission
from quire.cache.manager import CacheManager
from quire.scheduler.budget import StepBudget
from quire.scheduler.draft import PlanDraft
from quire.scheduler.gate import Gate
from quire.scheduler.placement import Placement, place
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.state import Int32s, RunningState
from quire.scheduler.ticket import Ticket


class Admissions:
    """Admits into `state` and `cache`; counts prompt tokens asked for and found by prefix."""

    def __init__(self, state: RunningState, cache: CacheManager, gates: Sequence[Gate]) -> None:
        self._state = state
        self._cache = cache
        self._gates = gates
        self.queried_tokens_total = 0
        self.hit_tokens_total = 0

    def admit(
        self, queue: WaitingQueue, draft: PlanDraft, budget: StepBudget, now_ms: float
    ) -> bool:
        """Admit while budget, slots and blocks last.

        Returns whether trying again in the next step can succeed though nothing else happens.
        """
        state, cache = self._state, self._cache
        active = state.active
        cache.register(active, state.computed[active], state.tokens.tokens)
        # What running requests need to compute all they know is spoken for.
        spoken_for = int(cache.blocks_short(active, state.goal[active]).sum())
        gated = False
        for ticket in queue:
            if budget.spent:
                return True
            if not state.free_slots:
                return gated
            if any(gate.holds(ticket, state, now_ms) for gate in self._gates):
                gated = True
                continue
            placement = place(ticket, cache, state)
            wanted = len(ticket.token_ids) - placement.start
            count = budget.most_tokens(placement.start, wanted)
            if count < 1:
                return True
            room = cache.num_takeable(placement.match) - spoken_for - self._margin()
            if placement.num_new_blocks > room:
                return gated
            queue.remove(ticket)
            spoken_for += self._start(draft, budget, ticket, placement, count, now_ms)
        return gated

    def _margin(self) -> int:
        """Blocks to leave free, so that who is admitted is not preempted at once.

        A running request takes a block every block_size steps: half a block for each of them is
        their growth over half that time. Nothing runs: no margin, or nothing ever would.
        """
        running = len(self._state.active)
        return max(self._cache.num_blocks // 100, running // 2) if running else 0

    def _start(
        self,
        draft: PlanDraft,
        budget: StepBudget,
        ticket: Ticket,
        placement: Placement,
        count: int,
        now_ms: float,
    ) -> int:
        """Carry out one admission; returns the blocks it will still need for what it knows."""
        state, cache = self._state, self._cache
        self._count_prefix(ticket, placement)
        if not ticket.was_admitted:
            ticket.first_scheduled_ms = now_ms
        slot = state.occupy(ticket, placement.start, placement.stored)
        slots, starts, counts = _one(slot), _one(placement.start), _one(count)
        self._fill_table(draft, slot, placement)
        ends, goals = starts + counts, state.goal[slots]
        needs = cache.blocks_short(slots, ends)
        if needs[0]:
            draft.add_deltas(cache.allocate(slots, needs))
        draft.add_admission(
            Admission(
                slot=slot,
                request_id=ticket.request.request_id,
                stream=ticket.request.stream,
                token_ids=ticket.token_ids,
                num_prompt_tokens=ticket.num_prompt_tokens,
                stop_ids=ticket.request.stop_ids,
                sampling=ticket.request.sampling,
            )
        )
        samples = state.schedule(slots, ends, goals)
        store_from = np.maximum(starts, state.stored[slots])
        draft.add_rows(slots, starts, counts, store_from, samples)
        budget.take(starts, counts)
        return int(cache.blocks_short(slots, goals)[0])

    def _fill_table(self, draft: PlanDraft, slot: int, placement: Placement) -> None:
        """Shared blocks, by fork or by prefix."""
        cache = self._cache
        if placement.leader_slot is not None:
            deltas, copy_from, copy_to = cache.fork(placement.leader_slot, slot, placement.stored)
            draft.add_deltas(deltas)
            cache.hold(copy_from, draft.step)
            draft.add_copies(copy_from, copy_to)
        elif placement.match is not None:
            draft.add_deltas(cache.attach(slot, placement.match))

    def _count_prefix(self, ticket: Ticket, placement: Placement) -> None:
        if placement.match is None:
            return
        self.queried_tokens_total += len(ticket.token_ids)
        self.hit_tokens_total += placement.stored
        if not ticket.was_admitted:
            ticket.cached_tokens = placement.stored


def _one(number: int) -> Int32s:
    return np.array([number], np.int32)
