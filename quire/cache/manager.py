"""CacheManager: which requests hold which KV blocks. The cache's only interface to the scheduler.

Combines the pool (free or not), the tables (of slots), and the prefix index (findable by content).
Knows slots, token counts and step numbers; no requests, no policy, no tensors. Always holds: a
block's references are the table entries that name it plus the holds on it; a block in the prefix
index holds exactly the keys and values of the chain its digest stands for, because blocks are
registered only up to positions of steps that have ended well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire._native import BlockOperations, Ghosts
from quire.base.errors import CapacityError
from quire.cache import audit, block_operations
from quire.cache.chain import (
    FIXED_KEY,
    Chain,
    ChainHasher,
    Owner,
    Owners,
    PrefixMatch,
    SlotChains,
    digests_of,
    keys_of,
)
from quire.cache.forks import ALL_COLUMNS, Forks
from quire.cache.lineage import Lineage
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable, Index, Int32s
from quire.cache.tier_map import TierMap
from quire.cache.tier_transfers import Fetch, TierTransfers

# Digests of evicted blocks that are remembered, for each block of the pool.
GHOSTS_PER_BLOCK = 4
_ZERO = np.int32(0)


class TableDeltas(NamedTuple):
    """New table entries: blocks[i] is now in column columns[i] of slot slots[i]."""

    slots: Int32s
    columns: Int32s
    blocks: Int32s


class CacheManager:
    """`num_blocks` blocks of `block_size` tokens.

    hash_key: 16 secret bytes, drawn anew for each process that serves, or kept with a tier; the
    default is for tests. fingerprint: of what computes the keys and values; those of another are
    never found. tier: where blocks that leave the pool stay findable. window: how many positions a
    token sees, its own included, in any layer; 0: all. Blocks behind it are given back while their
    request runs. operations: on many blocks at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        fingerprint: str = "",
        hash_key: bytes = FIXED_KEY,
        tier: TierMap | None = None,
        window: int = 0,
        operations: Callable[..., block_operations.BlockOperations] = BlockOperations,
    ) -> None:
        if block_size < 1:
            raise CapacityError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self._size = np.int32(block_size)
        self.prefix_caching = prefix_caching
        self.window = window
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks)
        self.ghosts = Ghosts(GHOSTS_PER_BLOCK * num_blocks)
        self.lineage = Lineage(num_blocks, block_size)
        self.hasher = ChainHasher(block_size, hash_key=hash_key, fingerprint=fingerprint)
        self.owners = Owners(self.hasher.seed)
        self._make_operations, self._hash_key = operations, hash_key
        self.tiers = (
            TierTransfers(tier, self.pool, self.index, self._insert_fetched)
            if tier is not None and prefix_caching
            else None
        )
        self.lay_out(num_slots=1, max_tokens=block_size)
        # Blocks still named by a step in flight: (that step, blocks), a reference on each.
        self.holds: list[tuple[int, Int32s]] = []
        self._settled_step = 0

    def lay_out(self, *, num_slots: int, max_tokens: int) -> None:
        """Make empty tables for `num_slots` requests of up to `max_tokens` positions."""
        num_columns = -(-max_tokens // self.block_size)
        self.tables = BlockTable(num_slots, num_columns, self.block_size, self.num_blocks)
        self._chains = SlotChains(num_slots)
        self._operations = self._make_operations(
            self.pool,
            self.tables,
            self._chains,
            self.index,
            self.ghosts,
            self.lineage,
            self._hash_key,
        )
        self._forks = Forks(
            self.tables, self._chains, self.index, self._operations, self._take_blocks
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self.pool.num_blocks

    @property
    def num_tokens(self) -> int:
        """Positions the whole pool can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_never_used(self) -> int:
        """How many of the pool's last blocks were never allocated."""
        return self._operations.num_never_used

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._operations.num_free

    @property
    def num_free_findable(self) -> int:
        """Of these, blocks that a prefix match would still find."""
        return self._operations.num_free_findable

    @property
    def capacities(self) -> Int32s:
        """Tokens that the blocks of each slot can hold, int32 [num_slots]."""
        return self.tables.capacities

    def can_allocate(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` blocks are free."""
        return num_blocks <= self._operations.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def allocated_blocks_total(self) -> int:
        """Blocks allocated in all."""
        return self._operations.allocated_blocks_total

    @property
    def evicted_blocks_total(self) -> int:
        """Findable blocks that were allocated anew, in all."""
        return self.pool.evicted_blocks_total

    @property
    def allocation_ns_total(self) -> int:
        """How long allocations took, where the operations measure it."""
        return self._operations.allocation_ns_total

    def blocks_lacking(self, slots: Index, num_tokens: Int32s) -> int:
        """Return how many blocks `slots` lack to hold num_tokens[i] tokens each."""
        return self._operations.blocks_lacking(slots, num_tokens)

    def blocks_short(self, slots: Index, num_tokens: Int32s) -> Int32s:
        """Return the blocks that slots[i] lacks to hold num_tokens[i] tokens."""
        return self.tables.blocks_short(slots, num_tokens)

    def allocate(self, slots: Index, added: Int32s) -> TableDeltas:
        """Give slots[i] (distinct) added[i] >= 1 further blocks.

        Raises CapacityError if too few are free; ask can_allocate first.
        """
        entries = TableDeltas._make(self._operations.allocate(slots, added))
        self._save_evicted()
        return entries

    def extend(self, slot: int, num_tokens: int) -> None:
        """Give one slot the blocks it lacks to hold `num_tokens` tokens."""
        self.extend_all(np.array([slot]), np.array([num_tokens], np.int32))

    def extend_all(self, slots: Index, num_tokens: Int32s) -> None:
        """Give each of `slots` (distinct) what it lacks to hold num_tokens[i] tokens."""
        self._operations.extend(slots, num_tokens)
        self._save_evicted()

    def entries(self, slot: int) -> TableDeltas:
        """Return all table entries of one slot."""
        return self.entries_of(np.array([slot]))

    def entries_of(self, slots: Index) -> TableDeltas:
        """Return all table entries of `slots`, slot by slot."""
        return TableDeltas._make(self._operations.entries(slots))

    def chain(self, token_ids: Int32s, salt: str, tenant: str = "") -> Chain | None:
        """Return the digests of the full blocks of known tokens; None without prefix caching.

        The tenant is for reports; what is shared depends on the salt alone.
        """
        if not self.prefix_caching:
            return None
        return self.hasher.chain(token_ids, self._owner(salt, tenant))

    def chains(self, requests: Sequence[tuple[Int32s, str, str]]) -> list[Chain]:
        """Return the chains of several (token_ids, salt, tenant), digested together.

        Only with prefix caching.
        """
        owners = [self._owner(salt, tenant) for _, salt, tenant in requests]
        return self.hasher.chains([token_ids for token_ids, _, _ in requests], owners)

    def match(self, chain: Chain) -> PrefixMatch:
        """Return the longest run of a chain's first blocks that the pool still holds."""
        return PrefixMatch(chain, self.index.table.longest_run(chain.digests))

    def match_all(self, chains: Sequence[Chain]) -> list[PrefixMatch]:
        """Return the match of each of `chains`, looked up together."""
        found = self.index.table.longest_runs([chain.digests for chain in chains])
        return [PrefixMatch(chain, blocks) for chain, blocks in zip(chains, found, strict=True)]

    def num_takeable(self, match: PrefixMatch | None) -> int:
        """Return the blocks that could be allocated once `match` is attached."""
        if match is None or not match.num_blocks:
            return self._operations.num_free
        return self._operations.num_free - self._operations.num_unreferenced(match.blocks)

    def attach(self, slot: int, match: PrefixMatch, *, returned: bool = False) -> None:
        """Make an empty slot begin with the blocks of `match`, shared.

        returned: its request was preempted, so what it finds may be its own, used once.
        """
        chain, blocks = match.chain, match.blocks
        owner = self.owners.number_now(chain.owner)
        self._operations.attach(slot, chain.digests, blocks, chain.owner.seed, owner, returned)
        if len(blocks) and not returned:
            self.pool.protect(blocks)
            self.lineage.found(blocks)

    def fork(self, source: int, slot: int, num_tokens: int) -> tuple[Int32s, Int32s]:
        """Make an empty slot begin with the first `num_tokens` tokens of `source`; see Forks."""
        return self._forks.fork(source, slot, num_tokens)

    def can_fork(self, source: int, num_tokens: int) -> bool:
        """Return whether `source` still has all that a fork of `num_tokens` tokens sees."""
        seen_from = max(num_tokens - self.window, 0) if self.window else 0
        return int(self.tables.firsts[source]) * self.block_size <= seen_from

    def branch(
        self, sources: Sequence[int], slots: Sequence[int], num_tokens: int, step: int
    ) -> tuple[Int32s, Int32s]:
        """Make each of `slots` begin with the first `num_tokens` tokens of its source; see Forks.

        What is copied from is held until `step` has ended.
        """
        return self._forks.branch(
            sources, slots, num_tokens, hold=lambda blocks: self.hold(blocks, step)
        )

    def hold(self, blocks: Int32s, step: int) -> None:
        """Keep `blocks` from being handed out until `step` has ended."""
        if len(blocks):
            self._operations.share(blocks)
            self.holds.append((step, blocks))

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> None:
        """Make the full blocks of `slots` findable, up to computed[i] tokens of slots[i].

        tokens: int32 [num_slots, positions], the known tokens by slot. `computed` must count only
        positions of steps that have ended well. Blocks that were not digested while their request
        waited are digested by one native call.
        """
        if not self.prefix_caching:
            return
        num_new = self._operations.register(slots, computed, tokens)
        if num_new and self.tiers is not None:
            digests, blocks = self._operations.last_inserted()
            self.tiers.findable(keys_of(digests), blocks)

    def swap_out(self, slot: int) -> None:
        """Save the full blocks of `slot`, which gives them back next, to the tier."""
        if self.tiers is not None:
            first = self.tables.firsts[slot]
            self.tiers.swap_out(self.tables.blocks[slot, first : self._findable_end(slot)])

    def swap_in(self, match: PrefixMatch, places: Int32s, token_ids: Int32s) -> Fetch:
        """Begin to load what comes after `match` in the chain of token_ids from the tier.

        Raises CapacityError if too few blocks are free.
        """
        assert self.tiers is not None, "places come from a tier"
        self.tiers.tier.begin_fetch(places)  # what is taken now may be saved, but not there
        self._operations.share(match.blocks)
        blocks = self._take_blocks(len(places))
        self._describe_fetched(match, blocks, token_ids)
        return self.tiers.swap_in(match.blocks, blocks, places, match.rest[: len(places)])

    def drop_behind(self, slots: Index, computed: Int32s, tokens: Int32s) -> int:
        """Give back the blocks that no token of `slots` (distinct) sees after computed[i] - 1.

        They stay findable. Arguments as of register(). Plans in flight may still name them: what is
        not seen may hold anything. Returns how many blocks became free.
        """
        if not self.window:
            return 0
        # The last token that is computed may be computed again, by a fork.
        firsts = np.maximum(computed - self.window, _ZERO) // self._size
        behind = (firsts > self.tables.firsts[slots]).nonzero()[0]
        if not len(behind):
            return 0
        slots, firsts = slots[behind], firsts[behind]
        self.register(slots, computed[behind], tokens)
        return self._operations.release(self.tables.drop(slots, firsts))

    def free(self, slots: Index, last_steps: NDArray[np.int64]) -> int:
        """Empty `slots` (distinct). last_steps[i] is the last step that names slots[i].

        Blocks of a slot with a last step that has not ended are held until it has. Within a request
        later blocks are forgotten first. Returns how many blocks became free now.
        """
        busy = last_steps > self._settled_step
        if not np.count_nonzero(busy):
            return self._operations.free(slots)
        for step in sorted(set(last_steps[busy].tolist())):
            self.holds.append((step, self._operations.clear(slots[last_steps == step])))
        return self._operations.free(slots[~busy])

    def settle(self, step: int) -> int:
        """Note that step `step`, and all before it, have ended; return the blocks freed."""
        self._settled_step = step
        if not self.holds:
            return 0
        ended = [blocks for until, blocks in self.holds if until <= step]
        self.holds = [(until, blocks) for until, blocks in self.holds if until > step]
        return sum(self._operations.release(blocks) for blocks in ended)

    def flush(self) -> int:
        """Make nothing known now findable; return how many blocks were findable.

        What runs keeps its blocks and goes on, and is not found either.
        """
        self._chains.registered[:] = ALL_COLUMNS
        self.ghosts.clear()
        self.pool.forget_all()
        if self.tiers is not None:
            self.tiers.forget_all()
        return self.index.clear()

    def num_freed_by(self, slot: int) -> int:
        """Return the blocks that only `slot` names: what freeing it would yield."""
        return self.pool.num_freed_by(self.tables.row(slot))

    def name_slot(self, slot: int, holder: str) -> None:
        """Note the request that takes `slot`, for reports of the audit."""
        self.tables.name(slot, holder)

    def check_integrity(self, *, repair: bool = False, quick: bool = False) -> list[str]:
        """Compare tables, references, free blocks and index; return contradictions in words.

        quick: only if references and holders disagree, which costs a few vector operations. With
        `repair` reference counts and free blocks are derived anew from tables and holds.
        """
        holds = self.holds if self.tiers is None else [*self.holds, *self.tiers.holds()]
        if quick and not audit.has_leaks(self.pool, self.tables, holds):
            return []
        found = audit.check(self.pool, self.index, self.tables, holds, repair=repair)
        return found if self.tiers is None else [*found, *self.tiers.problems()]

    def _take_blocks(self, count: int) -> Int32s:
        blocks = self._operations.take(count)
        self._save_evicted()
        return blocks

    def _save_evicted(self) -> None:
        """Let the tier save what the last allocation evicted."""
        if self.tiers is not None:
            digests, blocks = self._operations.last_evicted()
            if len(blocks):
                self.tiers.evicted(keys_of(digests), blocks)

    def _insert_fetched(self, keys: list[bytes], blocks: Int32s) -> None:
        """Make blocks that came from a tier findable."""
        digests = digests_of(keys)
        self.pool.findable[blocks[self.index.insert(digests, blocks)]] = True
        self.ghosts.take(digests)

    def _describe_fetched(self, match: PrefixMatch, blocks: Int32s, token_ids: Int32s) -> None:
        """Describe `blocks`, which come after `match`, for when they can be found."""
        chain, first, size = match.chain, match.num_blocks, self.block_size
        last = first + len(blocks)
        self.lineage.describe(
            blocks,
            parents=chain.parents(first, last),
            tokens=token_ids[first * size : last * size].reshape(-1, size),
            depths=np.arange(first + 1, last + 1, dtype=np.int32),
            owners=np.full(len(blocks), self.owners.number_now(chain.owner), np.int32),
        )

    def _owner(self, salt: str, tenant: str) -> Owner:
        return self.owners.owner(tenant, salt) or self.owners.add(tenant, salt, self._owners_now)

    def _owners_now(self) -> Int32s:
        """Return the owners of findable blocks, and of what runs or ran last in each slot."""
        return np.concatenate((self.lineage.owners[self.pool.findable], self._chains.owners))

    def _findable_end(self, slot: int) -> int:
        """Return the column of `slot` before which all were offered to the index."""
        return min(int(self._chains.registered[slot]), int(self.tables.counts[slot]))
