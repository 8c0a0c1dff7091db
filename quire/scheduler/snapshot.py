"""Describe the queue, the running batch and the KV blocks for an admin's view.

Reads the state of a scheduler's parts and changes nothing. Runs on request only: a few vector
operations over all blocks.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import numpy as np

from quire.base.block_copies import Tier
from quire.base.engine_snapshot import (
    BlockOwner,
    BlockUse,
    EngineSnapshot,
    Int32s,
    RequestSnapshot,
    StepPrices,
    TierSnapshot,
)
from quire.cache.explain import OTHERS, salt_name
from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState

MAX_LISTED = 256
MAX_CELLS = 4096

# Codes of blocks: these, then one for each running request, then two for each owner of cached ones.
_FREE, _PINNED, _SHARED, _FIRST_RUNNING = range(4)
_FIXED_USES = (BlockUse.FREE, BlockUse.PINNED, BlockUse.SHARED)


def engine_snapshot(
    batch: RunningBatch,
    requests: RequestTable,
    cache: CacheManager,
    *,
    limits: SchedulerLimits,
    speed: SpeedEstimate,
    steps_total: int,
    held_total: int,
    now_ms: float,
) -> EngineSnapshot:
    """Return the state as of now."""
    running = [batch.sequence(slot) for slot in batch.active.tolist()]
    codes = _block_codes(batch, cache)
    counts = np.bincount(codes)
    used = np.flatnonzero(counts)
    places = np.zeros(len(counts), np.int32)
    places[used] = np.arange(len(used))
    blocks_per_cell = max(-(-cache.num_blocks // MAX_CELLS), 1)
    run_lengths, run_owners = _runs(places[codes[::blocks_per_cell]])
    return EngineSnapshot(
        steps_total=steps_total,
        steps_in_flight=len(requests.in_flight),
        slots_total=len(batch.sequences),
        running_total=len(running),
        waiting_total=len(requests.queue),
        held_total=held_total,
        running=tuple(_request(one, batch, cache, now_ms) for one in running[:MAX_LISTED]),
        waiting=tuple(
            _request(one, batch, cache, now_ms) for one in islice(requests.queue, MAX_LISTED)
        ),
        block_size=cache.block_size,
        blocks_total=cache.num_blocks,
        blocks_per_cell=blocks_per_cell,
        owners=_owners(used.tolist(), counts[used].tolist(), running, cache),
        run_lengths=run_lengths,
        run_owners=run_owners,
        tiers=_tiers(cache),
        limits=asdict(limits),
        step_prices=StepPrices(steps_timed=speed.num_steps, **asdict(speed.now)),
    )


def _block_codes(batch: RunningBatch, cache: CacheManager) -> Int32s:
    """Return the code of each block."""
    pool, active = cache.pool, batch.active
    codes: Int32s = np.where(pool.references > 0, _PINNED, _FREE).astype(np.int32)
    cached = np.flatnonzero(pool.findable & (pool.references == 0))
    if len(cached):
        numbers = cache.lineage.owners[cached]
        first_cached = _FIRST_RUNNING + len(active)
        codes[cached] = first_cached + 2 * numbers + pool.protected[cached]
    if len(active):
        entries = cache.entries_of(active)
        places = np.zeros(len(batch.sequences), np.int32)
        places[active] = np.arange(len(active))
        codes[entries.blocks] = _FIRST_RUNNING + places[entries.slots]
        codes[np.bincount(entries.blocks, minlength=cache.num_blocks) > 1] = _SHARED
    return codes


def _owners(
    codes: list[int], counts: list[int], running: list[SequenceState], cache: CacheManager
) -> tuple[BlockOwner, ...]:
    """Return the owner of each of these codes."""
    by_number = cache.owners.by_number()
    owners = []
    for code, blocks in zip(codes, counts, strict=True):
        if code < _FIRST_RUNNING:
            owners.append(BlockOwner(use=_FIXED_USES[code], blocks=blocks))
        elif code < _FIRST_RUNNING + len(running):
            sequence = running[code - _FIRST_RUNNING]
            request = sequence.request
            owner = cache.owners.owner(request.tenant, request.cache_salt)
            owners.append(
                BlockOwner(
                    use=BlockUse.RUNNING,
                    blocks=blocks,
                    request=sequence.arrival,
                    tenant=request.tenant,
                    salt="" if owner is None else salt_name(owner),
                )
            )
        else:
            number, is_protected = divmod(code - _FIRST_RUNNING - len(running), 2)
            owner = by_number.get(number)
            owners.append(
                BlockOwner(
                    use=BlockUse.PROTECTED if is_protected else BlockUse.CACHED,
                    blocks=blocks,
                    tenant=OTHERS if owner is None else owner.tenant,
                    salt=OTHERS if owner is None else salt_name(owner),
                )
            )
    return tuple(owners)


def _runs(values: Int32s) -> tuple[Int32s, Int32s]:
    """Return lengths and values of the runs of equal values."""
    begins = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    lengths = np.diff(begins, append=len(values))
    return lengths.astype(np.int32), values[begins].astype(np.int32)


def _request(
    sequence: SequenceState, batch: RunningBatch, cache: CacheManager, now_ms: float
) -> RequestSnapshot:
    slot, request = sequence.slot, sequence.request
    known, computed, blocks = len(sequence.token_ids), 0, 0
    if slot != NO_SLOT:
        known = int(batch.tokens.lengths[slot])
        computed = int(batch.computed[slot])
        blocks = int(cache.tables.counts[slot] - cache.tables.firsts[slot])
    return RequestSnapshot(
        request=sequence.arrival,
        tenant=request.tenant,
        age_ms=max(now_ms - request.arrival_ms, 0.0),
        prompt_tokens=sequence.num_prompt_tokens,
        known_tokens=known,
        computed_tokens=computed,
        cached_tokens=sequence.kv.cached_tokens,
        max_tokens=sequence.limit,
        blocks=blocks,
        preemptions=sequence.preemption.count,
    )


def _tiers(cache: CacheManager) -> tuple[TierSnapshot, ...]:
    tiers = cache.tiers
    if tiers is None:
        return ()
    return (
        TierSnapshot(
            tier="host" if tiers.tier.kind is Tier.HOST else "disk",
            blocks_total=tiers.tier.num_blocks,
            blocks_used=len(tiers.tier),
            fetching=tiers.num_fetching,
            failed=tiers.is_broken,
        ),
    )
