"""KVLoads: waiting requests with keys and values in a tier, until these are in the pool.

A gate that opens by an event: all other requests go on meanwhile. Decides by predicted cost whether
a run of blocks is loaded or recomputed. Blocks that have arrived are kept for the request that
waits for them, but never against a running one: where that lacks room, all that was kept is
released, and stays findable until it is reused. So waiting for a load can hold up no request for
good.
"""

from __future__ import annotations

from typing import Any

from quire.base.block_copies import CopiesEnded
from quire.base.timeline import EventKind, WaitReason
from quire.cache.manager import CacheManager
from quire.cache.tier_transfers import Fetch
from quire.scheduler.admission.slot_allocation import KVSource
from quire.scheduler.cost.transfer_cost import TransferCost
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState

# How often blocks are loaded for one request before it runs; then it is computed.
MAX_LOADS = 3


class KVLoads:
    """The loads of a scheduler. cost: None without a tier. any_used: see interfaces.BlockLoads."""

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(self, cache: CacheManager, cost: TransferCost | None) -> None:
        self._cache = cache
        self.cost = cost
        self._waiting: dict[SequenceState, Fetch] = {}
        self._waiter_of: dict[Fetch, SequenceState] = {}
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
        """Return whether blocks for `sequence` are still on their way."""
        fetch = self._waiting.get(sequence)
        return fetch is not None and not fetch.has_ended

    def begin(self, sequence: SequenceState, source: KVSource, now_ms: float) -> bool:
        """Begin to load what the tier has for `sequence`, if that is worth waiting for.

        Returns whether it is. There must be room for source.num_new_blocks.
        """
        tiers, match, places = self._cache.tiers, source.match, source.places
        if tiers is None or self.cost is None or match is None or places is None:
            return False
        if self._num_fetches.get(sequence, 0) >= MAX_LOADS:
            return False
        if not tiers.tier.is_paid(places) and not self.cost.fetch_pays(
            source.stored, len(places), tiers.num_fetching
        ):
            return False
        self.any_used = True
        self.drop(sequence)  # what it was kept before is found, and counted again
        fetch = self._cache.swap_in(match, places, sequence.token_ids)
        self._waiting[sequence] = fetch
        self._waiter_of[fetch] = sequence
        self._began_ms[sequence] = now_ms
        sequence.history.note(now_ms, EventKind.LOAD_BEGUN, known=len(places))
        self._num_fetches[sequence] = self._num_fetches.get(sequence, 0) + 1
        return True

    def ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Note that copies have ended: update owners, speeds and counters."""
        tiers = self._cache.tiers
        assert tiers is not None, "copies are of tiers"
        assert self.cost is not None, "tiers come with costs"
        self.cost.learn(copies)
        for fetch in tiers.ended(copies):
            self.lost_blocks_total += int((~fetch.arrived).sum())
            sequence = self._waiter_of.get(fetch)
            if sequence is not None:
                sequence.kv.num_fetched_blocks += int(fetch.arrived.sum())
                sequence.kv.waited_ms += now_ms - self._began_ms[sequence]
                arrived = int(fetch.arrived.sum())
                sequence.history.note(now_ms, EventKind.LOAD_ENDED, known=arrived)
        self.fetched_blocks_total += copies.fetched
        self.saved_blocks_total += copies.saved
        self.bad_blocks_total += copies.num_bad
        if tiers.tier.keeps_evicted:
            tiers.saves_evicted = self.cost.return_ms(0, self._cache.block_size)[1]

    def drop(self, sequence: SequenceState) -> None:
        """Note that `sequence` no longer waits for its load."""
        fetch = self._waiting.pop(sequence, None)
        if fetch is not None:
            del self._waiter_of[fetch], self._began_ms[sequence]
            self._release(fetch)

    def forget(self, sequence: SequenceState) -> None:
        """Note that `sequence` runs, with references of its own, or has ended."""
        self._num_fetches.pop(sequence, None)
        self.drop(sequence)

    def release_kept(self, spared: SequenceState | None = None) -> bool:
        """Release what was kept for requests other than `spared`, or else for it too.

        Returns whether there was any. Blocks still on their way are kept for no request when they
        arrive.
        """
        before = self._cache.num_free
        for sequence in [sequence for sequence in self._waiting if sequence is not spared]:
            if self._waiting[sequence].has_ended:
                self.drop(sequence)
            else:
                self._release(self._waiting[sequence])
        if self._cache.num_free == before and spared is not None:
            self.drop(spared)
        return self._cache.num_free > before

    def stats(self) -> dict[str, Any]:
        """Return counts as fields of EngineStats."""
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
            "tier_failures_total": int(tiers.is_broken or tiers.tier.is_lost),
        }

    def _release(self, fetch: Fetch) -> None:
        tiers = self._cache.tiers
        assert tiers is not None, "kv_loads are of tiers"
        tiers.release(fetch)
