"""Native block operations against their plain twin: the same results and state, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire._native import BlockOperations, Ghosts
from quire.base.errors import CapacityError
from quire.cache.block_operations import PlainBlockOperations
from quire.cache.chain import FIXED_KEY, ChainHasher, Owner, SlotChains
from quire.cache.ghosts import PlainGhosts
from quire.cache.lineage import Lineage
from quire.cache.manager import CacheManager
from quire.cache.pool import BlockPool
from quire.cache.prefix_index import PrefixIndex
from quire.cache.table import BlockTable

NUM_BLOCKS, NUM_SLOTS, SIZE, NUM_COLUMNS, NUM_GHOSTS = 12, 4, 2, 6, 8
Drawn = tuple[str, int, int, bool]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def index(*values: int) -> np.ndarray:
    return np.array(values, np.intp)


class Parts:
    """The parts of a cache with the operations under test; `held` are blocks of no slot."""

    def __init__(self, *, is_native: bool) -> None:
        self.pool = BlockPool(NUM_BLOCKS, protected_share=0.25)
        self.tables = BlockTable(NUM_SLOTS, NUM_COLUMNS, SIZE, NUM_BLOCKS)
        self.chains, self.index = SlotChains(NUM_SLOTS), PrefixIndex(NUM_BLOCKS)
        self.ghosts = Ghosts(NUM_GHOSTS) if is_native else PlainGhosts(NUM_GHOSTS)
        self.lineage = Lineage(NUM_BLOCKS, SIZE)
        make: Callable[..., PlainBlockOperations | BlockOperations]
        make = BlockOperations if is_native else PlainBlockOperations
        state = (self.pool, self.tables, self.chains, self.index, self.ghosts, self.lineage)
        self.operations = make(*state, FIXED_KEY)
        self.hasher = ChainHasher(SIZE)
        # Few token ids, so that requests often begin alike.
        self.tokens = np.zeros((NUM_SLOTS, NUM_COLUMNS * SIZE), np.int32)
        self.held: list[np.ndarray] = []

    def begin(self, slot: int, content: int, *, returned: bool) -> object:
        """Fill an empty slot with tokens that depend on `content`; find its prefix."""
        if self.tables.counts[slot]:
            return None
        token_ids = np.arange(NUM_COLUMNS * SIZE, dtype=np.int32) // (content + 1)
        owner = Owner(content, "", "", self.hasher.seed(""))
        chain = self.hasher.chain(token_ids[: content * SIZE], owner)
        found = self.index.table.longest_run(chain.digests)
        self.tokens[slot] = token_ids
        self.tables.name(slot, f"{slot} {content}")
        self.operations.attach(slot, chain.digests, found, owner.seed, content, returned)
        self.pool.protect(found)
        return found.tolist()

    def apply(self, name: str, slot: int, count: int, *, flag: bool) -> object:
        """Apply one drawn operation; return what it returned, as plain values."""
        operations, slots = self.operations, index(slot, (slot + 1) % NUM_SLOTS)
        room = NUM_COLUMNS - self.tables.counts[slots]
        if name == "begin":
            return self.begin(slot, count, returned=flag)
        if name == "allocate":
            added = np.minimum(ints(count, 1), room).astype(np.int32)
            keep = added > 0
            return plain(operations.allocate(slots[keep], added[keep]), operations.last_evicted())
        if name == "extend":
            goal = ints(count * SIZE - flag, SIZE)
            lacking = operations.blocks_lacking(slots, goal)
            operations.extend(slots, goal)
            return lacking, plain(operations.last_evicted())
        if name == "take":
            self.held.append(operations.take(count))
            return plain((self.held[-1],), operations.last_evicted())
        if name == "release":
            return operations.release(self.held.pop()) if self.held else None
        if name == "clear":
            self.held.append(operations.clear(slots))
            return plain((self.held[-1],))
        if name == "free":
            return operations.free(slots)
        if name == "register":
            ends = self.tables.counts[slots] * np.int32(SIZE) - np.int32(flag)
            computed = np.maximum(ends, 0).astype(np.int32)
            number = operations.register(slots, computed, self.tokens)
            return number, plain(operations.last_inserted())
        if name == "pin":
            findable = np.flatnonzero(self.pool.findable).astype(np.int32)
            return self.pool.pin(findable[:count])
        if name == "unpin":
            return self.pool.unpin(np.flatnonzero(self.pool.pinned)[:count])
        every = self.tables.blocks[slot, : self.tables.counts[slot]]
        counts = operations.num_free, operations.num_never_used, operations.allocated_blocks_total
        return counts, operations.num_unreferenced(every), plain(operations.entries(slots))

    def state(self) -> list[object]:
        """All state, as plain values."""
        pool, tables, lineage = self.pool, self.tables, self.lineage
        arrays = (
            *(pool.references, pool.findable, pool.protected, pool.counts),
            *(pool.stack[: pool.counts[0]], *pool.free_blocks(), pool.protected_blocks()),
            *(pool.once.state, pool.again.state, pool.once.stamps, pool.again.stamps),
            *(pool.pinned, pool.kept.state, pool.kept.stamps),
            *(tables.blocks, tables.firsts, tables.counts, tables.capacities),
            *(tables.holders_by_block, self.chains.registered, self.chains.ends),
            *(self.chains.seeds, self.chains.owners, self.chains.returned),
            *(self.index.digests, self.index.known, self.index.table.find(self.index.digests)),
            *(lineage.parents, lineage.tokens, lineage.depths, lineage.owners, lineage.hits),
        )
        return [
            *(array.tolist() for array in arrays),
            len(self.ghosts),
            self.operations.num_free,
            self.operations.num_free_findable,
        ]


def plain(*parts: tuple[np.ndarray, ...]) -> list[list[object]]:
    """Return arrays with their types as values that can be compared."""
    return [[array.dtype.name, array.tolist()] for part in parts for array in part]


NAMES = ("begin", "allocate", "extend", "take", "release", "clear", "free", "register", "read")
NAMES += ("pin", "unpin")


FREQUENT = ("begin", "begin", "extend", "register", "register", "free", "free")


def compare(drawn: Iterable[Drawn]) -> None:
    """Apply the same operations to both; compare results and state after each."""
    native, twin = Parts(is_native=True), Parts(is_native=False)
    for name, slot, count, flag in drawn:
        results = []
        for parts in (native, twin):
            try:
                results.append(parts.apply(name, slot, count, flag=flag))
            except CapacityError as error:
                results.append(str(error))
        assert results[0] == results[1], name
        assert native.state() == twin.state(), name


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES + FREQUENT),
            st.integers(0, NUM_SLOTS - 1),
            st.integers(0, NUM_COLUMNS),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_native_operations_leave_the_state_of_their_plain_twin(drawn: list[Drawn]) -> None:
    compare(drawn)


@pytest.mark.parametrize("seed", range(3))
def test_long_sequences_leave_the_same_state(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = random.choice(NAMES + 4 * FREQUENT, 3_000).tolist()
    slots = random.integers(0, NUM_SLOTS, 3_000).tolist()
    counts = random.integers(0, NUM_COLUMNS + 1, 3_000).tolist()
    flags = random.random(3_000) < 0.5
    compare(zip(names, slots, counts, flags.tolist(), strict=True))


def test_refused_calls_change_nothing() -> None:
    parts = Parts(is_native=True)
    operations, before = parts.operations, parts.state()
    with pytest.raises(IndexError, match="no such slot"):
        operations.allocate(index(0, NUM_SLOTS), ints(1, 1))
    with pytest.raises(IndexError, match="more blocks than its table has columns"):
        operations.extend(index(0, 1), ints(SIZE, (NUM_COLUMNS + 1) * SIZE))
    with pytest.raises(IndexError, match="no such block"):
        operations.release(ints(0, NUM_BLOCKS))
    with pytest.raises(IndexError, match="no such blocks or tokens"):
        operations.register(index(0), ints(SIZE), parts.tokens)
    with pytest.raises(ValueError, match="differ in length"):
        operations.allocate(index(0, 1), ints(1))
    with pytest.raises(ValueError, match="a slot is given twice"):
        operations.allocate(index(0, 0), ints(4, 4))
    with pytest.raises(ValueError, match="a slot is given twice"):
        operations.extend(index(1, 0, 1), ints(SIZE, SIZE, SIZE))
    with pytest.raises(ValueError, match="a free block was released"):
        operations.release(ints(3))
    with pytest.raises(ValueError, match="a free block without content cannot be shared"):
        operations.share(ints(3))
    with pytest.raises(CapacityError, match="13 KV blocks were asked for and 12 of 12 are free"):
        operations.take(NUM_BLOCKS + 1)
    assert parts.state() == before


def test_a_block_is_released_at_most_once_a_reference() -> None:
    parts = Parts(is_native=True)
    operations = parts.operations
    (block,) = operations.take(1)
    operations.share(ints(block))
    before = parts.state()
    with pytest.raises(ValueError, match="a free block was released"):
        operations.release(ints(block, block, block))
    assert parts.state() == before
    assert operations.release(ints(block, block)) == 1


def test_a_queue_that_counts_more_blocks_than_it_holds_is_an_error() -> None:
    parts = Parts(is_native=True)
    parts.pool.counts[0] = 0  # no plain block is free
    parts.pool.once.state[3] = 1
    with pytest.raises(RuntimeError, match="holds fewer than it counts"):
        parts.operations.take(1)


def test_allocations_are_timed_only_where_asked() -> None:
    cache = CacheManager(8, SIZE, prefix_caching=False)
    timed = CacheManager(
        8, SIZE, prefix_caching=False, operations=partial(BlockOperations, timed=True)
    )
    for manager in (cache, timed):
        manager.extend(0, SIZE)
    assert cache.allocation_ns_total == 0
    assert timed.allocation_ns_total > 0
