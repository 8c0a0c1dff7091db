"""Seating: a slot, blocks and a first row for a request that is let in.

Knows where its keys and values come from (a placement) and how far it gets in its first step; who
is let in is decided elsewhere. Counts prompt tokens asked for and found by prefix. Always holds:
who is seated has blocks for all its first row stores, and what it found is referenced.
"""

from __future__ import annotations

import numpy as np

from quire.base.block_copies import Tier
from quire.base.cache_usage import CacheUsage, Miss, MissReason
from quire.cache.explain import miss_of
from quire.cache.manager import CacheManager
from quire.scheduler.draft import PlanDraft
from quire.scheduler.fetches import Fetches
from quire.scheduler.placement import Placement
from quire.scheduler.policy import Policy
from quire.scheduler.preemption_tally import PreemptionTally
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket

Row = tuple[int, int, int]  # slot, start, count


class Seating:
    """Into `state` and `cache`."""

    def __init__(
        self,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        fetches: Fetches,
        tally: PreemptionTally,
        speed: SpeedEstimate,
    ) -> None:
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._fetches = fetches
        self._tally = tally
        self._speed = speed
        self._tier = Tier.DISK if cache.tiers is None else cache.tiers.tier.kind
        self.queried_tokens_total = 0
        self.hit_tokens_total = 0
        self.tier_hit_tokens_total = {Tier.HOST: 0, Tier.DISK: 0}

    def seat(self, draft: PlanDraft, ticket: Ticket, placement: Placement, now_ms: float) -> int:
        """A slot for `ticket`, with the blocks that were found for it; returns the slot.

        Further blocks come with `add_rows`, for all newcomers of a step at once.
        """
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
        self._fetches.forget(ticket)
        ticket.num_fetched_blocks = 0
        draft.add_admission(ticket.admission())
        return slot

    def allocate(self, rows: list[Row]) -> None:
        """Give the slots of `rows` the blocks that these lack."""
        slots, starts, counts = np.array(rows, np.int32).T
        self._cache.extend_all(slots.astype(np.intp), starts + counts)

    def add_rows(self, draft: PlanDraft, rows: list[Row]) -> None:
        """The newcomers run from this step on, with blocks for all that `rows` store."""
        state = self._state
        slots, starts, counts = np.array(rows, np.int32).T.copy()
        index, ends = slots.astype(np.intp), starts + counts
        self._cache.extend_all(index, ends)
        draft.add_deltas(self._cache.entries_of(index))
        sample_counts = state.schedule(index, ends, state.goal[index])
        store_from = np.maximum(starts, state.stored[index])
        draft.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)

    def _cache_use(self, ticket: Ticket, placement: Placement) -> CacheUsage:
        """Where the stored tokens of `placement` were found, and why no more were."""
        cache = self._cache
        found = placement.match.num_blocks if placement.match is not None else 0
        if cache.prefix_caching and ticket.has_positions_to_score:
            miss: Miss | None = Miss(reason=MissReason.SCORED, token=placement.stored)
        else:
            miss = miss_of(cache, ticket.chain, found, ticket.token_ids)
        fetched = min(ticket.num_fetched_blocks, found)  # they are in the pool by now
        return CacheUsage(
            pool_tokens=(found - fetched) * cache.block_size,
            host_tokens=fetched * cache.block_size if self._tier is Tier.HOST else 0,
            disk_tokens=fetched * cache.block_size if self._tier is Tier.DISK else 0,
            miss=miss,
        )

    def _count_prefix(self, ticket: Ticket, placement: Placement) -> None:
        if placement.match is None or ticket.has_positions_to_score:  # not looked up
            return
        self.queried_tokens_total += len(ticket.token_ids)
        self.hit_tokens_total += placement.stored
        fetched_tokens = ticket.num_fetched_blocks * self._cache.block_size
        self.tier_hit_tokens_total[self._tier] += min(fetched_tokens, placement.stored)
        if not ticket.was_admitted:
            ticket.cached_tokens = placement.stored
