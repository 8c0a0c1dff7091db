"""KVLoads: requests whose keys and values lie in a tier wait here until they are in the pool.

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
from quire.scheduler.admission.slot_allocation import KVSource
from quire.scheduler.cost.transfer_cost import TransferCost
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState

# Times one request is fetched for before it runs: then it is computed, whatever is found.
MAX_LOADS = 3


class KVLoads:
    """Of one scheduler, and a Gate of it. cost: None where there is no tier."""

    until_event = True

    def __init__(self, cache: CacheManager, cost: TransferCost | None) -> None:
        self._cache = cache
        self.cost = cost
        self._waiting: dict[SequenceState, Fetch] = {}
        self._asker_of: dict[Fetch, SequenceState] = {}
        self._began_ms: dict[SequenceState, float] = {}
        self._num_fetches: dict[SequenceState, int] = {}
        self.any_used = False
        self.fetched_blocks_total = self.bad_blocks_total = self.lost_blocks_total = 0
        self.saved_blocks_total = 0

    @property
    def any_waits(self) -> bool:
        """Whether a request waits for blocks that have not arrived."""
        return any(not fetch.has_ended for fetch in self._waiting.values())

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """As a Gate: whether blocks for `sequence` are still on their way."""
        fetch = self._waiting.get(sequence)
        return fetch is not None and not fetch.has_ended

    def begin(self, sequence: SequenceState, source: KVSource, now_ms: float) -> bool:
        """Whether what the tier has for `sequence` is worth waiting for; then it is on its way.

        There must be room for source.num_new_blocks.
        """
        tiers, match = self._cache.tiers, source.match
        if tiers is None or self.cost is None or match is None or not len(source.places):
            return False
        if self._num_fetches.get(sequence, 0) >= MAX_LOADS:
            return False
        if not self.cost.fetch_pays(source.stored, len(source.places), tiers.num_fetching):
            return False
        self.any_used = True
        self.drop(sequence)  # what it was kept before is found, and counted again
        fetch = self._cache.swap_in(match, source.places, sequence.token_ids)
        self._waiting[sequence] = fetch
        self._asker_of[fetch] = sequence
        self._began_ms[sequence] = now_ms
        self._num_fetches[sequence] = self._num_fetches.get(sequence, 0) + 1
        return True

    def ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Copies have ended: books, speeds, counters."""
        tiers = self._cache.tiers
        assert tiers is not None, "copies are of tiers"
        assert self.cost is not None, "tiers come with costs"
        self.cost.learn(copies)
        for fetch in tiers.ended(copies):
            self.lost_blocks_total += int((~fetch.arrived).sum())
            sequence = self._asker_of.get(fetch)
            if sequence is not None:
                sequence.kv.num_fetched_blocks += int(fetch.arrived.sum())
                sequence.kv.waited_ms += now_ms - self._began_ms[sequence]
        self.fetched_blocks_total += copies.fetched
        self.saved_blocks_total += copies.saved
        self.bad_blocks_total += copies.num_bad
        tiers.saves_evicted = self.cost.return_ms(0, self._cache.block_size)[1]

    def drop(self, sequence: SequenceState) -> None:
        """`sequence` waits no longer for what it asked for."""
        fetch = self._waiting.pop(sequence, None)
        if fetch is not None:
            del self._asker_of[fetch], self._began_ms[sequence]
            self._release(fetch)

    def forget(self, sequence: SequenceState) -> None:
        """`sequence` runs, with references of its own, or is over."""
        self._num_fetches.pop(sequence, None)
        self.drop(sequence)

    def release_kept(self, keeper: SequenceState | None = None) -> bool:
        """Give back what was kept for others than `keeper`, or else for it too; whether there was
        any. What is still on its way is kept for nobody when it comes."""
        before = self._cache.num_free
        for sequence in [sequence for sequence in self._waiting if sequence is not keeper]:
            if self._waiting[sequence].has_ended:
                self.drop(sequence)
            else:
                self._release(self._waiting[sequence])
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
        assert tiers is not None, "kv_loads are of tiers"
        tiers.release(fetch)
