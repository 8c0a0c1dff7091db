"""SlotAllocator: a slot, blocks and a first row for a request that is admitted.

Also finds where its keys and values come from: a running leader of its group (a fork), the prefix
index and on from a tier, or nowhere. Which requests are admitted is decided elsewhere. Counts
prompt tokens looked up and found by prefix. Always holds: an admitted request has blocks for all
its first row stores, and references to what it found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.base.block_copies import Tier
from quire.base.cache_usage import CacheUsage, Miss, MissReason
from quire.base.records import Int32s
from quire.base.timeline import EventKind, HistoryEvent
from quire.cache.chain import PrefixMatch
from quire.cache.explain import miss_of
from quire.cache.manager import CacheManager
from quire.scheduler.interfaces import BlockLoads, Returns
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.prefix_pins import PrefixPins
from quire.scheduler.request_history import MissPoint
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.step_budget import BlockShares
from quire.scheduler.waiting_queue import QueuePolicy

Row = tuple[int, int, int]  # slot, start, count


@dataclass(slots=True)
class KVSource:
    """Where the keys and values of a request can come from when it is admitted.

    start: first position to compute. stored: positions before it lie in shared blocks. start is
    stored, except where all known tokens are there: then the last one is computed again, without
    storing, because its logits are needed. num_new_blocks: blocks to allocate until all its known
    tokens are computed, those of its beams included. places: where a tier continues its chain after
    `match`; these could be loaded first. None: it does not.
    """

    start: int
    stored: int
    num_new_blocks: int
    match: PrefixMatch | None = None
    places: Int32s | None = None
    leader_slot: int | None = None


def find_kv_source(
    sequence: SequenceState,
    cache: CacheManager,
    batch: RunningBatch,
    match: PrefixMatch | None = None,
) -> KVSource:
    """Return the cheapest way to admit `sequence` now. match: of its chain, if it is known."""
    known = len(sequence.token_ids)
    total_blocks = cache.blocks_for(known)
    if sequence.group is not None:
        total_blocks += sequence.group.num_tail_blocks(cache)
    leader = sequence.leader
    if (
        leader is not None
        and not sequence.was_admitted
        and leader.slot != NO_SLOT
        and batch.has_prompt(leader)
        and cache.can_fork(leader.slot, known)
    ):
        copied = int(known % cache.block_size > 0)
        return KVSource(known - 1, known, copied, leader_slot=leader.slot)
    if sequence.chain is None:
        request = sequence.request
        sequence.chain = cache.chain(sequence.token_ids, request.cache_salt, request.tenant)
        if sequence.chain is None:
            return KVSource(0, 0, total_blocks)
    if match is None:
        match = cache.match(sequence.chain)
    places = None
    if sequence.has_positions_to_score:  # what the index holds has no logits
        blocks = match.blocks[: sequence.num_scored // cache.block_size]
        match = PrefixMatch(match.chain, blocks)
    elif cache.tiers is not None:
        found = cache.tiers.run(match.rest)
        places = found if len(found) else None
    num_found = len(match.blocks)
    stored = num_found * cache.block_size
    return KVSource(min(stored, known - 1), stored, total_blocks - num_found, match, places)


class SlotAllocator:
    """Allocates slots of `batch` and blocks of `cache`."""

    def __init__(
        self,
        batch: RunningBatch,
        cache: CacheManager,
        policy: QueuePolicy,
        shares: BlockShares,
        loads: BlockLoads,
        returns: Returns,
        pins: PrefixPins,
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._policy = policy
        self._shares = shares
        self._loads = loads
        self._returns = returns
        self.pins = pins
        self._tier = Tier.DISK if cache.tiers is None else cache.tiers.tier.kind
        self.queried_tokens_total = 0
        self.hit_tokens_total = 0
        self.tier_hit_tokens_total = {Tier.HOST: 0, Tier.DISK: 0}

    def allocate_slot(
        self, builder: PlanBuilder, sequence: SequenceState, source: KVSource, now_ms: float
    ) -> int:
        """Give `sequence` a slot with the blocks that were found for it; return the slot.

        Further blocks come with `add_rows`, for all requests admitted in a step at once.
        """
        cache = self._cache
        returned = sequence.was_admitted
        if sequence.preemption.had_computed:
            self._returns.returned(sequence, source.start)
        if source.match is not None and not sequence.has_positions_to_score:  # so it was looked up
            self._count_prefix(sequence, source.stored)
        if sequence.request.explain_cache and not returned and source.leader_slot is None:
            sequence.kv.cache_use = self._cache_use(sequence, source, now_ms)
        if not returned:
            sequence.times.first_scheduled_ms = now_ms
            if source.match is not None:
                self._note_miss(sequence, source.match)
        slot = self._batch.occupy(sequence, source.start, source.stored)
        place, known = (builder.step, slot, source.start), len(sequence.token_ids)
        event = HistoryEvent(now_ms, EventKind.ADMITTED, *place, known)
        if returned:
            sequence.history.add(event)
        else:
            sequence.history.events.append(event)
        cache.name_slot(slot, sequence.request.request_id)
        self._shares.started(sequence)
        if self._policy.counts_running:
            self._policy.admitted(sequence, len(sequence.token_ids) - source.start)
        if source.leader_slot is not None:
            copy_from, copy_to = cache.fork(source.leader_slot, slot, source.stored)
            cache.hold(copy_from, builder.step)
            builder.add_copies(copy_from, copy_to)
        elif source.match is not None:
            cache.attach(slot, source.match, returned=returned)
        if self._loads.any_used:
            self._loads.forget(sequence)
            sequence.kv.num_fetched_blocks = 0
        builder.add_admission(sequence.admission())
        return slot

    def allocate(self, rows: list[Row]) -> None:
        """Give the slots of `rows` the blocks they lack."""
        slots, starts, counts = np.array([*zip(*rows, strict=True)], np.int32)
        self._cache.extend_all(slots.astype(np.intp), starts + counts)

    def add_rows(self, builder: PlanBuilder, rows: list[Row]) -> None:
        """Schedule the first rows of newly admitted requests, with blocks for what they store."""
        batch = self._batch
        slots, starts, counts = np.array([*zip(*rows, strict=True)], np.int32)
        index, ends = slots.astype(np.intp), starts + counts
        self._cache.extend_all(index, ends)
        builder.add_deltas(self._cache.entries_of(index))
        sample_counts = batch.schedule(index, ends, batch.goal[index])
        store_from = np.maximum(starts, batch.stored[index])
        builder.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)

    def _note_miss(self, sequence: SequenceState, match: PrefixMatch) -> None:
        """Note the first block that was not found, so that a timeline can say why."""
        chain, found = match.chain, len(match.blocks)
        sequence.history.is_scored = sequence.has_positions_to_score
        digests = chain.digests
        if found >= len(digests):
            return
        begin = found * self._cache.block_size
        sequence.history.miss = MissPoint(
            begin,
            digests[found].copy(),
            chain.end(found).copy(),
            digests[found] in self._cache.ghosts,
            sequence.token_ids[begin : begin + self._cache.block_size].copy(),
            chain.owner,
        )

    def _cache_use(self, sequence: SequenceState, source: KVSource, now_ms: float) -> CacheUsage:
        """Return where the stored tokens of `source` were found, and why no more were."""
        cache = self._cache
        found = source.match.num_blocks if source.match is not None else 0
        if cache.prefix_caching and sequence.has_positions_to_score:
            miss: Miss | None = Miss(reason=MissReason.SCORED, token=source.stored)
        else:
            miss = miss_of(cache, sequence.chain, found, sequence.token_ids)
        fetched = min(sequence.kv.num_fetched_blocks, found)  # they are in the pool by now
        is_marked = bool(sequence.request.cache_pins)
        return CacheUsage(
            pool_tokens=(found - fetched) * cache.block_size,
            host_tokens=fetched * cache.block_size if self._tier is Tier.HOST else 0,
            disk_tokens=fetched * cache.block_size if self._tier is Tier.DISK else 0,
            miss=miss,
            pinned_tokens=self.pins.begin(sequence, found, now_ms) if is_marked else (),
        )

    def _count_prefix(self, sequence: SequenceState, num_found: int) -> None:
        self.queried_tokens_total += len(sequence.token_ids)
        if not num_found:
            return
        self.hit_tokens_total += num_found
        if sequence.kv.num_fetched_blocks:
            fetched_tokens = sequence.kv.num_fetched_blocks * self._cache.block_size
            self.tier_hit_tokens_total[self._tier] += min(fetched_tokens, num_found)
        if not sequence.was_admitted:
            sequence.kv.cached_tokens = min(num_found, sequence.num_prompt_tokens)
