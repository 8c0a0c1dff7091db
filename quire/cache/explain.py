"""Reports on the cache: why a prefix was not found, and what is held for which owners.

Reads the state of a CacheManager and changes nothing. Slow beside it (a look at every block), so it
runs on request only. Always holds: what a report on a prompt says depends on prompts of the same
salt alone, or of the same named tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quire.base.block_copies import Tier
from quire.base.cache_usage import CacheReport, Miss, MissReason, OwnerUsage, PrefixUsage
from quire.cache.chain import OTHER_OWNERS, Chain, Owner, Uint64s
from quire.cache.manager import CacheManager
from quire.cache.table import Int32s

# Other salts of a tenant that are looked at, the latest.
MAX_OTHER_SALTS = 16
OTHERS = "(others)"

NO_HITS: Mapping[Tier, int] = MappingProxyType({})


def miss_of(
    cache: CacheManager, chain: Chain | None, num_found: int, token_ids: Int32s
) -> Miss | None:
    """Return why no more than `num_found` blocks of a chain were found; None where all were.

    chain: of `token_ids`; None without prefix caching.
    """
    if chain is None:
        return Miss(reason=MissReason.DISABLED, token=0)
    if num_found >= len(chain.digests):
        return None
    begin = num_found * cache.block_size
    if chain.digests[num_found] in cache.ghosts:
        return Miss(reason=MissReason.EVICTED, token=begin)
    if num_found == 0 and _is_under_another_salt(cache, chain.owner, token_ids):
        return Miss(reason=MissReason.OTHER_SALT, token=0)
    block = token_ids[begin : begin + cache.block_size]
    agreed = cache.lineage.agreement(chain.end(num_found), block, cache.pool.findable)
    if agreed is None:
        return Miss(reason=MissReason.NOT_SEEN, token=begin)
    return Miss(reason=MissReason.FIRST_DIFFERENCE, token=begin + agreed)


def miss_at(
    cache: CacheManager,
    token: int,
    *,
    parent: Uint64s,
    digest: Uint64s,
    was_evicted: bool,
    block: Int32s,
    owner: Owner,
) -> Miss:
    """Return why a block was not found, judged by what the cache holds now.

    parent, digest: of the chain before the block and with it. was_evicted: at that time. The block
    itself may be found by now and counts as no other.
    """
    if was_evicted:
        return Miss(reason=MissReason.EVICTED, token=token)
    if token == 0 and _is_under_another_salt(cache, owner, block):
        return Miss(reason=MissReason.OTHER_SALT, token=0)
    findable = cache.pool.findable
    own = int(cache.index.table.find(digest[None])[0])
    if own >= 0:
        findable = findable.copy()
        findable[own] = False
    agreed = cache.lineage.agreement(parent, block, findable)
    if agreed is None:
        return Miss(reason=MissReason.NOT_SEEN, token=token)
    return Miss(reason=MissReason.FIRST_DIFFERENCE, token=token + agreed)


def report_of(
    cache: CacheManager,
    *,
    queried_tokens_total: int,
    hit_tokens_total: int,
    tier_hit_tokens_total: Mapping[Tier, int] = NO_HITS,
    num_prefixes: int,
) -> CacheReport:
    """Return what the cache holds now, with the prefixes that saved most tokens."""
    pool = cache.pool
    return CacheReport(
        prefix_caching=cache.prefix_caching,
        block_size=cache.block_size,
        blocks_total=pool.num_blocks,
        blocks_used=pool.num_blocks - pool.num_free,
        blocks_once=pool.num_free_findable - pool.num_free_protected - pool.num_free_pinned,
        blocks_again=pool.num_free_protected,
        blocks_again_most=pool.max_protected,
        blocks_pinned=pool.num_free_pinned,
        blocks_plain=pool.num_free - pool.num_free_findable,
        blocks_findable=len(cache.index),
        ghosts=len(cache.ghosts),
        ghosts_most=cache.ghosts.limit,
        queried_tokens_total=queried_tokens_total,
        hit_tokens_total=hit_tokens_total,
        host_hit_tokens_total=tier_hit_tokens_total.get(Tier.HOST, 0),
        disk_hit_tokens_total=tier_hit_tokens_total.get(Tier.DISK, 0),
        evicted_blocks_total=cache.evicted_blocks_total,
        prefixes=_prefixes(cache, num_prefixes),
        owners=_owners(cache),
    )


def _is_under_another_salt(cache: CacheManager, owner: Owner, token_ids: Int32s) -> bool:
    """Return whether its tenant has the first block under another salt of its own.

    Nothing is reported for the unnamed tenant (""): its requests share a name and nothing else.
    """
    if not owner.tenant:
        return False
    others = [each for each in cache.owners.of_tenant(owner.tenant) if each.salt != owner.salt]
    block = token_ids[: cache.block_size]
    return any(
        cache.match(cache.hasher.chain(block, other)).num_blocks
        for other in others[:MAX_OTHER_SALTS]
    )


def _prefixes(cache: CacheManager, count: int) -> tuple[PrefixUsage, ...]:
    lineage, owners = cache.lineage, cache.owners.by_number()
    found: list[PrefixUsage] = []
    for block in lineage.top_found(cache.pool.findable, count).tolist():
        key = cache.index.key_of(block)
        if key is None:
            continue
        owner = owners.get(int(lineage.owners[block]))
        found.append(
            PrefixUsage(
                digest=key.hex(),
                tokens=int(lineage.depths[block]) * cache.block_size,
                hits=int(lineage.hits[block]),
                tenant=owner.tenant if owner else OTHERS,
                salt=salt_name(owner) if owner else OTHERS,
                protected=bool(cache.pool.protected[block]),
            )
        )
    return tuple(found)


def _owners(cache: CacheManager) -> tuple[OwnerUsage, ...]:
    """Return the owners of findable blocks, most blocks first."""
    numbers = cache.lineage.owners[cache.pool.findable]
    counts = np.bincount(numbers, minlength=1)
    owners = cache.owners.by_number()
    held = [
        OwnerUsage(tenant=owner.tenant, salt=salt_name(owner), blocks=int(counts[number]))
        for number, owner in owners.items()
        if number < len(counts) and counts[number]
    ]
    if counts[OTHER_OWNERS]:
        blocks = int(counts[OTHER_OWNERS])
        held.append(OwnerUsage(tenant=OTHERS, salt=OTHERS, blocks=blocks))
    return tuple(sorted(held, key=lambda use: -use.blocks))


def salt_name(owner: Owner) -> str:
    """Return a name for a salt: its digest, because a salt is like a key to what it covers."""
    return owner.seed.tobytes().hex() if owner.salt else ""
