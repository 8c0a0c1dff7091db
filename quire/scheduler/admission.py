"""Admission: waiting requests get slots, blocks and their first tokens of budget.

Knows the queue's order, gates, placements and what must stay free for those that run. Preempts
nobody. Always holds: a request is admitted only if the blocks for all its known tokens are free
beside those that running requests still need for theirs; who is blocked blocks those behind it,
so nobody is overtaken but by those a gate lets pass, and long prompts by a few short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.base.cache_use import CacheUse, Miss, MissReason
from quire.cache.explain import miss_of
from quire.cache.manager import CacheManager
from quire.scheduler.budget import StepBudget
from quire.scheduler.coming import ComingBlocks
from quire.scheduler.draft import PlanDraft
from quire.scheduler.fetches import Fetches
from quire.scheduler.gate import Gate
from quire.scheduler.groups import BeamGroups
from quire.scheduler.placement import Placement, place
from quire.scheduler.policy import Policy
from quire.scheduler.preemption_tally import PreemptionTally
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket
from quire.scheduler.watermark import Watermark

_Row = tuple[int, int, int]  # slot, start, count
# So many short requests may pass a long one that lacks blocks; then it blocks them.
MAX_PASSED = 16


class Admissions:
    """Admits into `state` and `cache`; counts prompt tokens asked for and found by prefix."""

    def __init__(
        self,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        gates: Sequence[Gate],
        groups: BeamGroups,
        *,
        fetches: Fetches,
        watermark: Watermark,
        tally: PreemptionTally,
        speed: SpeedEstimate,
    ) -> None:
        self._groups = groups
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._gates = gates
        self._fetches = fetches
        self._watermark = watermark
        self._tally = tally
        self._speed = speed
        self._coming = ComingBlocks(cache.block_size)
        self.queried_tokens_total = 0
        self.hit_tokens_total = 0
        self.disk_hit_tokens_total = 0

    def admit(
        self,
        queue: WaitingQueue,
        draft: PlanDraft,
        budget: StepBudget,
        now_ms: float,
        *,
        floors_only: bool = False,
        before: tuple[float, ...] | None = None,
    ) -> bool:
        """Admit while budget, slots and blocks last. floors_only: those whose tenant has blocks
        held back for it, into these. before: none of this rank or behind.

        Returns whether trying again in the next step can succeed though nothing else happens.
        """
        state, cache, tenants = self._state, self._cache, self._tenants
        # Nobody can be admitted: then nobody looks for a prefix, and registering can wait.
        if budget.spent or not state.free_slots:
            return budget.spent
        tenants.changed()
        self._coming.begin_step(state)
        active = state.active
        cache.register(active, state.computed[active], state.tokens.tokens)
        # What running requests need to compute all they know is spoken for.
        spoken_for = int(np.add.reduce(cache.blocks_short(active, state.goal[active])))
        rows: list[_Row] = []
        started: list[int] = []  # slots of `rows`, and of beams that have no row yet
        try_again, blocked = False, floors_only
        held: set[str] = set()  # tenants whose turn has come, and who wait
        passed: Ticket | None = None  # a long one that lacks blocks and may still be passed
        skips_long = False
        for ticket in queue:
            if budget.spent or (before is not None and self._policy.rank(ticket) >= before):
                try_again = True
                break
            if len(state.free_slots) < ticket.num_slots:
                break
            if passed is not None and passed.passed >= MAX_PASSED:
                blocked = True
            if blocked and not tenants.someone_has_floor_left():
                break
            tenant = ticket.request.tenant
            if tenant in held or tenants.is_full(ticket) or (skips_long and ticket.is_long):
                continue
            if blocked and not tenants.has_floor_left(ticket):
                continue
            gate = next((gate for gate in self._gates if gate.holds(ticket, state, now_ms)), None)
            if gate is not None:
                try_again |= not gate.until_event
                continue
            placement = place(ticket, cache, state)
            if self._is_coming(ticket, placement, budget):
                try_again = True
                continue
            margin = self._watermark.blocks(len(active) + len(rows), draft.step)
            takeable = cache.num_takeable(placement.match)
            taken = placement.num_new_blocks + cache.num_free - takeable
            if not tenants.passes_ceiling(ticket, taken):
                held.add(tenant)
                continue
            room = takeable - spoken_for - margin - tenants.kept_from(ticket)
            has_room = not blocked and placement.num_new_blocks <= room
            if not has_room and not tenants.fits_floor(ticket, taken):
                # What was fetched for others gives way; there may be room in the next step.
                try_again = self._fetches.let_go(ticket) or try_again
                if ticket.is_long and not blocked:
                    passed, skips_long = ticket, True
                else:
                    blocked = True
                    held.add(tenant)
                continue
            if self._fetches.begin(ticket, placement, now_ms):
                spoken_for += placement.num_new_blocks - len(placement.places)
                continue
            known = len(ticket.token_ids)
            count = budget.hand_out_one(
                placement.start,
                known - placement.start,
                scored=ticket.has_positions_to_score,
                is_long=ticket.is_long,
            )
            if count < 1:
                try_again = True
                if not ticket.is_long:
                    break
                skips_long = True  # its kind's share of the step is spent, not the step
                continue
            if passed is not None:
                passed.passed += 1
            queue.remove(ticket)
            tenants.waits_no_more(ticket)
            end = placement.start + count
            slot = self._start(draft, ticket, placement, end, now_ms)
            rows.append((slot, placement.start, count))
            started.append(slot)
            spoken_for += cache.blocks_for(known) - cache.blocks_for(end)
            spoken_for += ticket.num_tail_blocks(cache)
            if ticket.beams is not None:
                started += self._groups.seat(ticket, draft)
        if rows:
            state.activate(started)
            self._add_rows(draft, rows)
        return try_again

    def _start(
        self, draft: PlanDraft, ticket: Ticket, placement: Placement, end: int, now_ms: float
    ) -> int:
        """A slot for `ticket`, with blocks for the tokens before `end`; returns the slot."""
        cache = self._cache
        returned = ticket.was_admitted
        if ticket.had_computed:
            self._tally.returned(ticket, placement.start, self._speed)
        self._count_prefix(ticket, placement)
        if ticket.request.explain_cache and not returned and placement.leader_slot is None:
            ticket.cache_use = self._cache_use(ticket, placement)
        if not returned:
            ticket.first_scheduled_ms = now_ms
        slot = self._state.occupy(ticket, placement.start, placement.stored)
        cache.name_slot(slot, ticket.request.request_id)
        self._tenants.runs(ticket)
        self._policy.admitted(ticket, len(ticket.token_ids) - placement.start)
        if placement.leader_slot is not None:
            copy_from, copy_to = cache.fork(placement.leader_slot, slot, placement.stored)
            cache.hold(copy_from, draft.step)
            draft.add_copies(copy_from, copy_to)
        elif placement.match is not None:
            cache.attach(slot, placement.match, returned=returned)
            self._coming.expect(ticket, placement.match.num_blocks, end)
        cache.extend(slot, end)
        self._fetches.forget(ticket)
        ticket.num_fetched_blocks = 0
        draft.add_deltas(cache.entries(slot))
        draft.add_admission(ticket.admission())
        return slot

    def _add_rows(self, draft: PlanDraft, rows: list[_Row]) -> None:
        """The newcomers run from this step on."""
        state = self._state
        slots, starts, counts = np.array(rows, np.int32).T.copy()
        index, ends = slots.astype(np.intp), starts + counts
        samples = state.schedule(index, ends, state.goal[index])
        store_from = np.maximum(starts, state.stored[index])
        draft.add_rows(index, slots, starts, counts, ends, store_from, samples)

    def _is_coming(self, ticket: Ticket, placement: Placement, budget: StepBudget) -> bool:
        """Whether so much of its prefix will be there when steps in flight end that it waits."""
        if placement.match is None or ticket.has_positions_to_score:
            return False
        could_compute = min(len(ticket.token_ids) - placement.start, budget.tokens)
        return self._coming.holds(ticket, placement.match.num_blocks, could_compute, self._state)

    def _cache_use(self, ticket: Ticket, placement: Placement) -> CacheUse:
        """Where the stored tokens of `placement` were found, and why no more were."""
        cache = self._cache
        found = placement.match.num_blocks if placement.match is not None else 0
        if cache.prefix_caching and ticket.has_positions_to_score:
            miss: Miss | None = Miss(reason=MissReason.SCORED, token=placement.stored)
        else:
            miss = miss_of(cache, ticket.chain, found, ticket.token_ids)
        fetched = min(ticket.num_fetched_blocks, found)  # they are in the pool by now
        return CacheUse(
            pool_tokens=(found - fetched) * cache.block_size,
            disk_tokens=fetched * cache.block_size,
            miss=miss,
        )

    def _count_prefix(self, ticket: Ticket, placement: Placement) -> None:
        if placement.match is None or ticket.has_positions_to_score:  # not looked up
            return
        self.queried_tokens_total += len(ticket.token_ids)
        self.hit_tokens_total += placement.stored
        fetched_tokens = ticket.num_fetched_blocks * self._cache.block_size
        self.disk_hit_tokens_total += min(fetched_tokens, placement.stored)
        if not ticket.was_admitted:
            ticket.cached_tokens = placement.stored
