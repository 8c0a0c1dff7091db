"""Operations on many blocks at once: allocate, share, release, and make findable.

The state lies in arrays of the parts of the cache. `BlockOperations` defines what the native class
(native/src/block_operations.cc) and its plain twin do alike; both leave the same state, bit for
bit. The serving path uses the native class: one call for a step's arrivals or completions costs
what a single NumPy call does.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.cache.chain import NO_DIGESTS, HashChains, SlotChains, Uint64s
from quire.cache.ghosts import PlainGhosts
from quire.cache.lineage import Lineage
from quire.cache.plain_digest import hash_chains
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable, Index, Int32s

Entries = tuple[Int32s, Int32s, Int32s]  # slots, columns, blocks

_NO_BLOCKS: Int32s = np.empty(0, np.int32)


class BlockOperations(Protocol):
    """The operations of one cache.

    Slots are distinct, slots, columns and blocks exist, and shared blocks are referenced or
    findable, released ones referenced; the native class raises an error where that is not so. Where
    too few blocks are free, CapacityError is raised. A call that raises changes nothing.
    """

    @property
    def allocation_ns_total(self) -> int:
        """Time in `take`, `allocate` and `extend`; only the native class measures it, if asked."""

    @property
    def allocated_blocks_total(self) -> int:
        """Blocks allocated in all."""

    @property
    def num_never_used(self) -> int:
        """How many of the pool's last blocks were never allocated."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""

    @property
    def num_free_findable(self) -> int:
        """Of these, blocks that a prefix match would still find."""

    def take(self, count: int) -> Int32s:
        """Allocate blocks for no slot, each with one reference."""

    def allocate(self, slots: Index, added: Int32s) -> Entries:
        """Give slots[i] added[i] further blocks; return the new table entries."""

    def extend(self, slots: Index, num_tokens: Int32s) -> None:
        """Give slots[i] the blocks it lacks to hold num_tokens[i] tokens."""

    def entries(self, slots: Index) -> Entries:
        """Return all table entries of `slots`, slot by slot."""

    def blocks_lacking(self, slots: Index, num_tokens: Int32s) -> int:
        """Return how many blocks `slots` lack to hold num_tokens[i] tokens each."""

    def num_unreferenced(self, blocks: Int32s) -> int:
        """Return how many of `blocks` are free now."""

    def share(self, blocks: Int32s) -> None:
        """Add one reference to each of `blocks`."""

    def release(self, blocks: Int32s) -> int:
        """Take one reference from each of `blocks`; return how many became free."""

    def free(self, slots: Index) -> int:
        """Empty `slots` and release their blocks; return how many became free."""

    def clear(self, slots: Index) -> Int32s:
        """Empty `slots`; return their blocks, still referenced, last column first in each slot."""

    def attach(
        self,
        slot: int,
        digests: Uint64s,
        blocks: Int32s,
        seed: Uint64s,
        owner: int,
        returned: bool,
    ) -> None:
        """Begin the chain of an empty slot, with a reference on the `blocks` it shares.

        digests: of its first full blocks, `blocks` and others that are not digested again. seed,
        owner, returned: see SlotChains.
        """

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> int:
        """Make the full blocks of `slots` findable, up to computed[i] tokens.

        tokens: int32 [slots, positions]. Returns how many blocks became findable.
        """

    def last_evicted(self) -> tuple[Uint64s, Int32s]:
        """Return digests and blocks that the last allocation evicted."""

    def last_inserted(self) -> tuple[Uint64s, Int32s]:
        """Return digests and blocks that the last `register` made findable."""


class PlainBlockOperations:
    """The plain twin, in NumPy."""

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTable,
        chains: SlotChains,
        index: PrefixIndex,
        ghosts: PlainGhosts,
        lineage: Lineage,
        key: bytes,
        hash_blocks: HashChains = hash_chains,
    ) -> None:
        self._pool, self._tables, self._chains = pool, tables, chains
        self._index, self._ghosts, self._lineage = index, ghosts, lineage
        self._key, self._hash_blocks = key, hash_blocks
        self._known = [NO_DIGESTS] * len(tables.counts)
        self._evicted = self._inserted = (NO_DIGESTS, _NO_BLOCKS)

    @property
    def allocation_ns_total(self) -> int:
        """See BlockOperations."""
        return 0

    @property
    def allocated_blocks_total(self) -> int:
        """See BlockOperations."""
        return self._pool.allocated_blocks_total

    @property
    def num_never_used(self) -> int:
        """See BlockOperations."""
        return self._pool.num_never_used

    @property
    def num_free(self) -> int:
        """See BlockOperations."""
        return self._pool.num_free

    @property
    def num_free_findable(self) -> int:
        """See BlockOperations."""
        return self._pool.num_free_findable

    def take(self, count: int) -> Int32s:
        """See BlockOperations."""
        blocks, evicted = self._pool.allocate(count)
        digests = self._index.forget(evicted)
        self._ghosts.add(digests)
        self._evicted = (digests, evicted.astype(np.int32))
        return blocks

    def allocate(self, slots: Index, added: Int32s) -> Entries:
        """See BlockOperations."""
        blocks = self.take(int(np.add.reduce(added)))
        rows, columns = self._tables.append_many(slots, added, blocks)
        return rows.astype(np.int32), columns, blocks

    def extend(self, slots: Index, num_tokens: Int32s) -> None:
        """See BlockOperations."""
        self._evicted = (NO_DIGESTS, _NO_BLOCKS)
        short = self._tables.blocks_short(slots, num_tokens)
        lacks = short.nonzero()[0]
        if len(lacks):
            self.allocate(slots[lacks], short[lacks])

    def entries(self, slots: Index) -> Entries:
        """See BlockOperations."""
        firsts = self._tables.firsts[slots]
        counts = self._tables.counts[slots] - firsts
        ends = np.add.accumulate(counts, dtype=np.intp)
        rows = slots.repeat(counts)
        columns = np.arange(len(rows)) - (ends - counts - firsts).repeat(counts)
        return rows.astype(np.int32), columns.astype(np.int32), self._tables.blocks[rows, columns]

    def blocks_lacking(self, slots: Index, num_tokens: Int32s) -> int:
        """See BlockOperations."""
        return int(np.add.reduce(self._tables.blocks_short(slots, num_tokens)))

    def num_unreferenced(self, blocks: Int32s) -> int:
        """See BlockOperations."""
        return self._pool.num_unreferenced(blocks)

    def share(self, blocks: Int32s) -> None:
        """See BlockOperations."""
        self._pool.share(blocks)

    def release(self, blocks: Int32s) -> int:
        """See BlockOperations."""
        return self._pool.release(blocks)

    def free(self, slots: Index) -> int:
        """See BlockOperations."""
        return self._pool.release(self.clear(slots))

    def clear(self, slots: Index) -> Int32s:
        """See BlockOperations."""
        self._chains.registered[slots] = 0
        for slot in slots.tolist():
            self._known[slot] = NO_DIGESTS
        return self._tables.take(slots)

    def attach(
        self,
        slot: int,
        digests: Uint64s,
        blocks: Int32s,
        seed: Uint64s,
        owner: int,
        returned: bool,
    ) -> None:
        """See BlockOperations."""
        chains = self._chains
        self._known[slot] = digests
        chains.registered[slot] = len(blocks)
        chains.seeds[slot] = seed
        chains.ends[slot] = digests[len(blocks) - 1] if len(blocks) else seed
        chains.owners[slot], chains.returned[slot] = owner, returned
        if len(blocks):
            self._pool.share(blocks)
            self._tables.append(slot, blocks)

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> int:
        """See BlockOperations."""
        size = self._tables.block_size
        found: list[tuple[Uint64s, Int32s]] = [(NO_DIGESTS, _NO_BLOCKS)]
        for slot, last in zip(slots.tolist(), (computed // size).tolist(), strict=True):
            first = int(self._chains.registered[slot])
            if last <= first:
                continue
            digests = self._known[slot][first:last]
            if last > len(self._known[slot]):
                digests = self._digests(slot, first, last, tokens)
            found.append(self._insert(slot, first, digests, tokens))
        self._inserted = (
            np.concatenate([digests for digests, _ in found]),
            np.concatenate([blocks for _, blocks in found]),
        )
        return len(self._inserted[1])

    def last_evicted(self) -> tuple[Uint64s, Int32s]:
        """See BlockOperations."""
        return self._evicted

    def last_inserted(self) -> tuple[Uint64s, Int32s]:
        """See BlockOperations."""
        return self._inserted

    def _digests(self, slot: int, first: int, last: int, tokens: Int32s) -> Uint64s:
        size = self._tables.block_size
        token_ids, end = tokens[slot, first * size : last * size], self._chains.ends[slot]
        return self._hash_blocks([token_ids], [end], size, self._key)

    def _insert(
        self, slot: int, first: int, digests: Uint64s, tokens: Int32s
    ) -> tuple[Uint64s, Int32s]:
        """Make the blocks of `slot` from column `first` on findable; return those that are new.

        A block that was evicted and is computed again is protected like one that was found.
        """
        size, chains = self._tables.block_size, self._chains
        last = first + len(digests)
        blocks = self._tables.blocks[slot, first:last]
        parents = np.concatenate((chains.ends[slot : slot + 1], digests[:-1]))
        new = self._index.insert(digests, blocks)
        chains.registered[slot], chains.ends[slot] = last, digests[-1]
        blocks, digests, columns = blocks[new], digests[new], first + new
        self._pool.findable[blocks] = True
        again = self._ghosts.take(digests)
        if not chains.returned[slot]:
            self._pool.protect(blocks[again])
        by_block = tokens[slot, : tokens.shape[1] // size * size].reshape(-1, size)
        self._lineage.describe(
            blocks,
            parents=parents[new],
            tokens=by_block[columns],
            depths=columns + 1,
            owners=np.full(len(blocks), chains.owners[slot], np.int32),
        )
        return digests, blocks
