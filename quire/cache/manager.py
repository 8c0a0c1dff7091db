"""CacheManager: which requests hold which KV blocks. The cache's only interface to the scheduler.

Combines the pool (free or not), the tables (of slots), and the prefix index (findable by content).
Knows slots, token counts and step numbers; no requests, no policy, no tensors. Always holds: a
block's references are the table entries that name it plus the holds on it; a block in the prefix
index holds exactly the keys and values of the chain its digest stands for, because blocks are
registered only up to positions of steps that have ended well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire._native import hash_chains
from quire.base.errors import CapacityError
from quire.cache import audit
from quire.cache.chain import Chain, ChainHasher, PrefixMatch
from quire.cache.digest import FIXED_KEY, HashChains, Uint64s, digests_of, keys_of
from quire.cache.ghosts import Ghosts
from quire.cache.lineage import Lineage
from quire.cache.owners import Owner, Owners
from quire.cache.pool import BlockPool, Bools
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable, Index, Int32s
from quire.cache.tier_map import TierMap
from quire.cache.tier_transfers import Fetch, TierTransfers

# Columns of a slot that count as offered to the index where nothing of it may be found.
_ALL_COLUMNS = np.iinfo(np.int32).max
# Digests of evicted blocks that are remembered, for each block of the pool.
GHOSTS_PER_BLOCK = 4
_ZERO = np.int32(0)
NO_BLOCKS: Int32s = np.empty(0, np.int32)


@dataclass(slots=True, kw_only=True)  # not frozen: that costs a steady step half a microsecond
class TableDeltas:
    """New table entries: blocks[i] is now in column columns[i] of slot slots[i]."""

    slots: Int32s
    columns: Int32s
    blocks: Int32s


class CacheManager:
    """`num_blocks` blocks of `block_size` tokens.

    hash_key: 16 secret bytes, drawn anew for each process that serves, or kept with a tier; the
    default is for tests. fingerprint: of what computes the keys and values; those of another are
    never found. tier: where blocks that leave the pool stay findable, at most max_saving of them on
    their way there at once. window: how many positions a token sees, its own included, in any
    layer; 0: all. Blocks behind it are given back while their request runs. make_pool: makes the
    pool of num_blocks blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        fingerprint: str = "",
        hash_key: bytes = FIXED_KEY,
        hash_blocks: HashChains = hash_chains,
        tier: TierMap | None = None,
        max_saving: int = 16,
        window: int = 0,
        make_pool: Callable[[int], BlockPool] = BlockPool,
    ) -> None:
        if block_size < 1:
            raise CapacityError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self._size = np.int32(block_size)
        self.prefix_caching = prefix_caching
        self.window = window
        self.pool = make_pool(num_blocks)
        self.index = PrefixIndex(num_blocks)
        self.ghosts = Ghosts(GHOSTS_PER_BLOCK * num_blocks)
        self.lineage = Lineage(num_blocks, block_size)
        self.hasher = ChainHasher(
            block_size, hash_key=hash_key, fingerprint=fingerprint, hash_blocks=hash_blocks
        )
        self.owners = Owners(self.hasher.seed)
        self.evicted_blocks_total = 0
        self.tiers = (
            TierTransfers(tier, self.pool, self.index, self._insert_fetched, max_saving=max_saving)
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
        # How many leading columns of a slot were offered to the index, and the digest there.
        self._registered: Int32s = np.zeros(num_slots, np.int32)
        self._chain_ends: Uint64s = np.zeros((num_slots, 2), np.uint64)
        self._seeds: Uint64s = np.zeros((num_slots, 2), np.uint64)
        # What was digested while a request waited: its slot's chain, and how many blocks that has.
        self._chains: list[Chain | None] = [None] * num_slots
        self._chain_blocks: Int32s = np.zeros(num_slots, np.int32)
        # Slots of requests that were here before: that one needs its own blocks twice is no reuse.
        self._returned: Bools = np.zeros(num_slots, np.bool_)
        self._owner_numbers: Int32s = np.zeros(num_slots, np.int32)

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
        return self.pool.num_never_used

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self.pool.num_free

    @property
    def capacities(self) -> Int32s:
        """Tokens that the blocks of each slot can hold, int32 [num_slots]."""
        return self.tables.capacities

    def can_allocate(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` blocks are free."""
        return num_blocks <= self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_short(self, slots: Index, num_tokens: Int32s) -> Int32s:
        """Return the blocks that slots[i] lacks to hold num_tokens[i] tokens."""
        # Rounded up by rounding down what is left over; -(-x // y) as in blocks_for.
        left = (self.tables.capacities[slots] - num_tokens) // self._size
        short: Int32s = -np.minimum(left, _ZERO)
        return short

    def allocate(self, slots: Index, added: Int32s) -> TableDeltas:
        """Give slots[i] (distinct) added[i] >= 1 further blocks.

        Raises CapacityError if too few are free; ask can_allocate first.
        """
        blocks = self._take_blocks(int(np.add.reduce(added)))
        rows, columns = self.tables.append_many(slots, added, blocks)
        return TableDeltas(slots=rows.astype(np.int32), columns=columns, blocks=blocks)

    def extend(self, slot: int, num_tokens: int) -> None:
        """Give one slot the blocks it lacks to hold `num_tokens` tokens."""
        lacking = self.blocks_for(num_tokens) - int(self.tables.counts[slot])
        if lacking > 0:
            self.tables.append(slot, self._take_blocks(lacking))

    def extend_all(self, slots: Index, num_tokens: Int32s) -> None:
        """Give each of `slots` (distinct) what it lacks to hold num_tokens[i] tokens."""
        short = self.blocks_short(slots, num_tokens)
        lacks = short.nonzero()[0]
        if len(lacks):
            self.allocate(slots[lacks], short[lacks])

    def entries_of(self, slots: Index) -> TableDeltas:
        """Return all table entries of `slots`, slot by slot."""
        firsts = self.tables.firsts[slots]
        counts = self.tables.counts[slots] - firsts
        ends = np.add.accumulate(counts, dtype=np.intp)
        rows = slots.repeat(counts)
        columns = np.arange(ends[-1]) - (ends - counts - firsts).repeat(counts)
        return TableDeltas(
            slots=rows.astype(np.int32),
            columns=columns.astype(np.int32),
            blocks=self.tables.blocks[rows, columns],
        )

    def entries(self, slot: int) -> TableDeltas:
        """Return all table entries of a slot that was just filled."""
        blocks, first = self.tables.row(slot).copy(), int(self.tables.firsts[slot])
        slots = np.empty_like(blocks)
        slots.fill(slot)
        return TableDeltas(
            slots=slots,
            columns=np.arange(first, first + len(blocks), dtype=np.int32),
            blocks=blocks,
        )

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
        return PrefixMatch(chain, self.index.longest_match(chain.digests))

    def match_all(self, chains: Sequence[Chain]) -> list[PrefixMatch]:
        """Return the match of each of `chains`, looked up together."""
        found = self.index.find(np.concatenate([chain.digests for chain in chains]))
        if not np.count_nonzero(found >= 0):
            return [PrefixMatch(chain, NO_BLOCKS) for chain in chains]
        matches, begin = [], 0
        for chain in chains:
            end = begin + len(chain.digests)
            blocks = found[begin:end]
            missing = (blocks < 0).nonzero()[0]
            matches.append(PrefixMatch(chain, blocks[: missing[0]] if len(missing) else blocks))
            begin = end
        return matches

    def num_takeable(self, match: PrefixMatch | None) -> int:
        """Return the blocks that could be allocated once `match` is attached."""
        if match is None or not match.num_blocks:
            return self.pool.num_free
        return self.pool.num_free - self.pool.num_unreferenced(match.blocks)

    def attach(self, slot: int, match: PrefixMatch, *, returned: bool = False) -> None:
        """Make an empty slot begin with the blocks of `match`, shared.

        returned: its request was preempted, so what it finds may be its own, used once.
        """
        self._returned[slot] = returned
        self._registered[slot] = match.num_blocks
        self._seeds[slot] = match.chain.owner.seed
        self._owner_numbers[slot] = self.owners.number_now(match.chain.owner)
        self._chain_ends[slot] = match.chain.end(match.num_blocks)
        self._chains[slot] = match.chain
        self._chain_blocks[slot] = len(match.chain.digests)
        if match.num_blocks:
            self.pool.share(match.blocks)
            if not returned:
                self.pool.protect(match.blocks)
                self.lineage.found(match.blocks)
            self.tables.append(slot, match.blocks)

    def fork(self, source: int, slot: int, num_tokens: int) -> tuple[Int32s, Int32s]:
        """Make an empty slot begin with the first `num_tokens` tokens of `source`.

        Full blocks are shared. A partial last block is copied at once, because the fork's next
        token goes into it. Returns (copy_from, copy_to), each of one block or none. The block
        copied from must stay as it is until the step that copies has ended: hold() it.
        """
        full, end = num_tokens // self.block_size, self.blocks_for(num_tokens)
        first, row = int(self.tables.firsts[source]), self.tables.blocks[source]
        shared, partial = row[first:full].copy(), row[full:end].copy()
        self._inherit_chain(slot, source, shared, full)
        self.pool.share(shared)
        own = self._take_blocks(len(partial))
        self.tables.begin(slot, first)
        self.tables.append(slot, np.concatenate((shared, own)))
        return partial, own

    def can_fork(self, source: int, num_tokens: int) -> bool:
        """Return whether `source` still has all that a fork of `num_tokens` tokens sees."""
        seen_from = max(num_tokens - self.window, 0) if self.window else 0
        return int(self.tables.firsts[source]) * self.block_size <= seen_from

    def branch(
        self, sources: Sequence[int], slots: Sequence[int], num_tokens: int, step: int
    ) -> tuple[Int32s, Int32s]:
        """Make each of `slots` (distinct) begin with the first `num_tokens` tokens of its source.

        Whatever a slot held before is given back, but only after all have what they need: a slot
        may be a source at once. No plan in flight may name any of them. Shares and copies as
        fork() does; what is copied from is held until `step` has ended.
        """
        full, end = num_tokens // self.block_size, self.blocks_for(num_tokens)
        firsts = self.tables.firsts[list(sources)].tolist()
        rows = [self.tables.blocks[source, :end].copy() for source in sources]
        for first, row in zip(firsts, rows, strict=True):
            self.pool.share(row[first:full])
        copy_from = np.concatenate([NO_BLOCKS, *(row[full:] for row in rows)])
        self.hold(np.unique(copy_from), step)
        index = np.array(slots, np.intp)
        self.pool.release(self.tables.take(index))
        copy_to = self._take_blocks(len(copy_from))
        for at, (source, slot, row) in enumerate(zip(sources, slots, rows, strict=True)):
            shared = row[firsts[at] : full]
            self._inherit_chain(slot, source, shared, full)
            own = copy_to[at : at + 1] if end > full else copy_to[:0]
            self.tables.begin(slot, firsts[at])
            self.tables.append(slot, np.concatenate((shared, own)))
        return copy_from, copy_to

    def hold(self, blocks: Int32s, step: int) -> None:
        """Keep `blocks` from being handed out until `step` has ended."""
        if len(blocks):
            self.pool.share(blocks)
            self.holds.append((step, blocks))

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> None:
        """Make the full blocks of `slots` findable, up to computed[i] tokens of slots[i].

        tokens: int32 [num_slots, positions], the known tokens by slot. `computed` must count only
        positions of steps that have ended well. Blocks that were not digested while their request
        waited are digested by one native call.
        """
        if not self.prefix_caching:
            return
        lasts = computed // self._size
        firsts = self._registered[slots]
        fresh = (lasts > firsts).nonzero()[0]
        if not len(fresh):
            return
        slots, firsts, lasts = slots[fresh], firsts[fresh], lasts[fresh]
        order, digests = self._digests(slots, firsts, lasts, tokens)
        if order is not None:
            slots, firsts, lasts = slots[order], firsts[order], lasts[order]
        counts = lasts - firsts
        ends = np.add.accumulate(counts, dtype=np.intp)
        begins = ends - counts
        columns = np.arange(len(digests)) - (begins - firsts).repeat(counts)
        each_slot = slots.repeat(counts)
        parents = np.empty_like(digests)
        parents[1:] = digests[:-1]
        parents[begins] = self._chain_ends[slots]
        blocks = self.tables.blocks[each_slot, columns]
        self._insert(digests, parents, blocks, each_slot, columns, tokens)
        self._registered[slots] = lasts
        self._chain_ends[slots] = digests[ends - 1]

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
        self.pool.share(match.blocks)
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
        return self.pool.release(self.tables.drop(slots, firsts))

    def free(self, slots: Index, last_steps: NDArray[np.int64]) -> int:
        """Empty `slots` (distinct). last_steps[i] is the last step that names slots[i].

        Blocks of a slot with a last step that has not ended are held until it has. Within a request
        later blocks are forgotten first. Returns how many blocks became free now.
        """
        self._registered[slots] = 0
        self._chain_blocks[slots] = 0
        for slot in slots.tolist():
            self._chains[slot] = None
        busy = last_steps > self._settled_step
        if not np.count_nonzero(busy):
            return self.pool.release(self.tables.take(slots))
        for step in np.unique(last_steps[busy]).tolist():
            self.holds.append((step, self.tables.take(slots[last_steps == step])))
        return self.pool.release(self.tables.take(slots[~busy]))

    def settle(self, step: int) -> int:
        """Note that step `step`, and all before it, have ended; return the blocks freed."""
        self._settled_step = step
        if not self.holds:
            return 0
        ended = [blocks for until, blocks in self.holds if until <= step]
        self.holds = [(until, blocks) for until, blocks in self.holds if until > step]
        return sum(self.pool.release(blocks) for blocks in ended)

    def flush(self) -> int:
        """Make nothing known now findable; return how many blocks were findable.

        What runs keeps its blocks and goes on, and is not found either.
        """
        self._registered[:] = _ALL_COLUMNS
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
        blocks, evicted = self.pool.allocate(count)
        if len(evicted):
            self.evicted_blocks_total += len(evicted)
            digests = self.index.forget(evicted)
            self.ghosts.add(digests)
            if self.tiers is not None:
                self.tiers.evicted(keys_of(digests), evicted.astype(np.int32))
        return blocks

    def _digests(
        self, slots: Index, firsts: Int32s, lasts: Int32s, tokens: Int32s
    ) -> tuple[Index | None, Uint64s]:
        """Return digests of blocks firsts[i] .. lasts[i] - 1 of slots[i], and their order of i.

        None for the order as it is. What was digested while its request waited comes first, and is
        not digested again.
        """
        is_known = lasts <= self._chain_blocks[slots]
        num_known = np.count_nonzero(is_known)
        if not num_known:
            return None, self._go_on(slots, firsts, lasts, tokens)
        known = is_known.nonzero()[0]
        ranges = (slots[known].tolist(), firsts[known].tolist(), lasts[known].tolist())
        parts = [
            self._chain_of(slot).digests[first:last]
            for slot, first, last in zip(*ranges, strict=True)
        ]
        if num_known == len(slots):
            return None, parts[0] if num_known == 1 else np.concatenate(parts)
        rest = (~is_known).nonzero()[0]
        parts.append(self._go_on(slots[rest], firsts[rest], lasts[rest], tokens))
        return np.concatenate((known, rest)), np.concatenate(parts)

    def _go_on(self, slots: Index, firsts: Int32s, lasts: Int32s, tokens: Int32s) -> Uint64s:
        """Return digests of blocks that were not digested yet, from firsts[i] on."""
        return self.hasher.go_on(tokens, slots, firsts, lasts - firsts, self._chain_ends[slots])

    def _chain_of(self, slot: int) -> Chain:
        chain = self._chains[slot]
        assert chain is not None, "a slot without a chain has no block of one"
        return chain

    def _insert(
        self,
        digests: Uint64s,
        parents: Uint64s,
        blocks: Int32s,
        slots: Index,
        columns: NDArray[np.int64],
        tokens: Int32s,
    ) -> None:
        """Make blocks[i], in columns[i] of slots[i], findable under digests[i].

        What was evicted and is computed again is as good as found: it is protected.
        """
        new = self.index.insert(digests, blocks)
        if not len(new):
            return
        if len(new) < len(digests):
            digests = digests[new]
            blocks, slots, columns = blocks[new], slots[new], columns[new]
            parents = parents[new]
        index = blocks.astype(np.intp)
        self.pool.findable[index] = True
        again = self.ghosts.take(digests)
        if np.count_nonzero(again):
            self.pool.protect(blocks[again & ~self._returned[slots]])
        num_columns = tokens.shape[1] // self.block_size
        by_block = tokens[:, : num_columns * self.block_size].reshape(
            len(tokens), num_columns, self.block_size
        )
        self.lineage.describe(
            index,
            parents=parents,
            tokens=by_block[slots, columns],
            depths=columns + 1,
            owners=self._owner_numbers[slots],
        )
        if self.tiers is not None:
            self.tiers.findable(keys_of(digests), blocks)

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
        return np.concatenate((self.lineage.owners[self.pool.findable], self._owner_numbers))

    def _findable_end(self, slot: int) -> int:
        """Return the column of `slot` before which all were offered to the index."""
        return min(int(self._registered[slot]), int(self.tables.counts[slot]))

    def _inherit_chain(self, slot: int, source: int, shared: Int32s, num_blocks: int) -> None:
        """Continue the chain of `source` in `slot`, behind the `shared` blocks.

        They need no second digest where the index knows the last of them, number num_blocks of the
        chain.
        """
        self._chains[slot], self._chain_blocks[slot] = None, 0
        self._seeds[slot] = self._seeds[source]
        self._owner_numbers[slot] = self._owner_numbers[source]
        self._returned[slot] = False
        if self._registered[source] == _ALL_COLUMNS:  # flushed since
            self._registered[slot] = _ALL_COLUMNS
            return
        key = self.index.key_of(int(shared[-1])) if len(shared) else None
        if key is None:
            # From the first block on, unless that was given back: then nothing of it is offered.
            self._registered[slot] = 0 if len(shared) == num_blocks else _ALL_COLUMNS
            self._chain_ends[slot] = self._seeds[slot]
            return
        self._registered[slot] = num_blocks
        self._chain_ends[slot] = np.frombuffer(key, np.uint64)
