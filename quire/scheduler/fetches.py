"""Fetches: requests whose keys and values lie in a tier wait here until they are in the pool.

A gate (see gate.py) that opens by an event: all others go on meanwhile. Decides by predicted cost
whether a run of blocks is fetched or computed again. Blocks that have arrived are kept for who
waits for them, but never against who runs: where those lack room, all that was kept is let go, and
is found as long as nobody takes it. So waiting for a fetch can hold nobody up for good.
"""

from __future__ import annotations

from typing import Any

from quire.base.block_copies import CopiesEnded
from quire.cache.manager import CacheManager
from quire.cache.tier_books import Fetch
from quire.scheduler.move_cost import MoveCost
from quire.scheduler.placement import Placement
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket

# Times one request is fetched for before it runs: then it is computed, whatever is found.
MOST_FETCHES = 3


class Fetches:
    """Of one scheduler, and a Gate of it. cost: None where there is no tier."""

    until_event = True

    def __init__(self, cache: CacheManager, cost: MoveCost | None) -> None:
        self._cache = cache
        self.cost = cost
        self._waiting: dict[Ticket, Fetch] = {}
        self._asker_of: dict[Fetch, Ticket] = {}
        self._began_ms: dict[Ticket, float] = {}
        self._num_fetches: dict[Ticket, int] = {}
        self.fetched_blocks_total = self.bad_blocks_total = self.lost_blocks_total = 0
        self.saved_blocks_total = 0

    @property
    def any_waits(self) -> bool:
        """Whether a request waits for blocks that have not arrived."""
        return any(not fetch.has_ended for fetch in self._waiting.values())

    def holds(self, ticket: Ticket, state: RunningState, now_ms: float) -> bool:
        """As a Gate: whether blocks for `ticket` are still on their way."""
        fetch = self._waiting.get(ticket)
        return fetch is not None and not fetch.has_ended

    def begin(self, ticket: Ticket, placement: Placement, now_ms: float) -> bool:
        """Whether what the tier has for `ticket` is worth waiting for; then it is on its way.

        There must be room for placement.num_new_blocks.
        """
        tiers, match = self._cache.tiers, placement.match
        if tiers is None or self.cost is None or match is None or not len(placement.places):
            return False
        if self._num_fetches.get(ticket, 0) >= MOST_FETCHES:
            return False
        if not self.cost.fetch_pays(placement.stored, len(placement.places), tiers.num_fetching):
            return False
        self.drop(ticket)  # what it was kept before is found, and counted again
        fetch = self._cache.swap_in(match, placement.places, ticket.token_ids)
        self._waiting[ticket] = fetch
        self._asker_of[fetch] = ticket
        self._began_ms[ticket] = now_ms
        self._num_fetches[ticket] = self._num_fetches.get(ticket, 0) + 1
        return True

    def ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Copies have ended: books, speeds, counters."""
        tiers = self._cache.tiers
        assert tiers is not None, "copies are of tiers"
        assert self.cost is not None, "tiers come with costs"
        self.cost.learn(copies)
        for fetch in tiers.ended(copies):
            self.lost_blocks_total += int((~fetch.arrived).sum())
            ticket = self._asker_of.get(fetch)
            if ticket is not None:
                ticket.num_fetched_blocks += int(fetch.arrived.sum())
                ticket.waited_ms += now_ms - self._began_ms[ticket]
        self.fetched_blocks_total += copies.fetched
        self.saved_blocks_total += copies.saved
        self.bad_blocks_total += copies.num_bad
        tiers.saves_evicted = self.cost.return_ms(0, self._cache.block_size)[1]

    def drop(self, ticket: Ticket) -> None:
        """`ticket` waits no longer for what it asked for."""
        fetch = self._waiting.pop(ticket, None)
        if fetch is not None:
            del self._asker_of[fetch], self._began_ms[ticket]
            self._release(fetch)

    def forget(self, ticket: Ticket) -> None:
        """`ticket` runs, with references of its own, or is over."""
        self._num_fetches.pop(ticket, None)
        self.drop(ticket)

    def let_go(self, keeper: Ticket | None = None) -> bool:
        """Give back what was kept for others than `keeper`, or else for it too; whether there was
        any. What is still on its way is kept for nobody when it comes."""
        before = self._cache.num_free
        for ticket in [ticket for ticket in self._waiting if ticket is not keeper]:
            if self._waiting[ticket].has_ended:
                self.drop(ticket)
            else:
                self._release(self._waiting[ticket])
        if self._cache.num_free == before and keeper is not None:
            self.drop(keeper)
        return self._cache.num_free > before

    def stats(self) -> dict[str, Any]:
        """As fields of EngineStats."""
        tiers = self._cache.tiers
        if tiers is None:
            return {}
        return {
            "tier_blocks_total": 0 if tiers.is_broken else tiers.tier.num_blocks,
            "tier_blocks_used": len(tiers.tier),
            "tier_saved_blocks_total": self.saved_blocks_total,
            "tier_fetched_blocks_total": self.fetched_blocks_total,
            "tier_unsaved_blocks_total": tiers.unsaved_total,
            "tier_bad_blocks_total": self.bad_blocks_total,
            "tier_failures_total": int(tiers.is_broken),
        }

    def _release(self, fetch: Fetch) -> None:
        tiers = self._cache.tiers
        assert tiers is not None, "fetches are of tiers"
        tiers.release(fetch)
