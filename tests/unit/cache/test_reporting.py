"""ReportingCacheManager: its events rebuild the content of the prefix index, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache import plain_digest
from quire.cache.block_operations import PlainBlockOperations
from quire.cache.reporting import (
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    ReportingCacheManager,
)

NUM_BLOCKS, SIZE, NUM_SLOTS = 8, 4, 3


class Tree:
    """What a subscriber knows: of each block its parent and its tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.reports_isolated = False

    def put(self, event: BlockEvent) -> None:
        if isinstance(event, CacheCleared):
            self.blocks.clear()
        elif isinstance(event, BlocksRemoved):
            for hash_ in event.hashes:
                del self.blocks[hash_]
        else:
            assert isinstance(event, BlocksStored)
            assert len(event.token_ids) == SIZE * len(event.hashes) > 0
            parent = event.parent
            for at, hash_ in enumerate(event.hashes):
                assert hash_ not in self.blocks
                tokens = event.token_ids[at * SIZE : (at + 1) * SIZE]
                self.blocks[hash_] = (parent, tokens)
                parent = hash_


class Cache:
    def __init__(
        self, *, reports_isolated: bool = False, is_plain: bool = False, hash_key: bytes = bytes(16)
    ) -> None:
        self.tree = Tree()
        self.tree.reports_isolated = reports_isolated
        options: dict[str, Any] = {"hash_key": hash_key}
        if is_plain:
            options["operations"] = _plain
        self.cache = ReportingCacheManager(
            NUM_BLOCKS, SIZE, prefix_caching=True, events=self.tree, **options
        )
        self.cache.lay_out(num_slots=NUM_SLOTS, max_tokens=NUM_BLOCKS * SIZE)
        self.tokens = np.zeros((NUM_SLOTS, NUM_BLOCKS * SIZE), np.int32)
        self.open: dict[int, str] = {}

    def begin(self, slot: int, token_ids: list[int], salt: str = "") -> None:
        cache = self.cache
        chain = cache.chain(np.array(token_ids, np.int32), salt)
        assert chain is not None
        match = cache.match(chain)
        lacking = -(-len(token_ids) // SIZE) - match.num_blocks
        if slot in self.open or lacking > cache.num_takeable(match):
            return
        cache.attach(slot, match)
        if lacking:
            cache.allocate(np.array([slot]), np.array([lacking], np.int32))
        self.tokens[slot, : len(token_ids)] = token_ids
        cache.register(np.array([slot]), np.array([len(token_ids)], np.int32), self.tokens)
        self.open[slot] = salt

    def end(self, slot: int) -> None:
        if self.open.pop(slot, None) is not None:
            self.cache.free(np.array([slot]), np.zeros(1, np.int64))

    def findable(self) -> dict[int, tuple[int | None, tuple[int, ...]]]:
        """Return what the prefix index holds of blocks that are reported."""
        cache, found = self.cache, {}
        owners = cache.owners.by_number()
        for block in np.flatnonzero(cache.index.known).tolist():
            owner = owners.get(int(cache.lineage.owners[block]))
            if (owner is None or owner.salt) and not self.tree.reports_isolated:
                continue
            hash_ = int(cache._public[cache.index.digests[block].tobytes()][1])
            parent = None
            if cache.lineage.depths[block] > 1:
                key = cache.lineage.parents[block].tobytes()
                known = cache._public.get(key, cache._gone.get(key))
                assert known is not None
                parent = int(known[1])
            found[hash_] = (parent, tuple(cache.lineage.tokens[block].tolist()))
        return found


def _plain(*arguments: Any) -> PlainBlockOperations:
    return PlainBlockOperations(*arguments, hash_blocks=plain_digest.hash_chains)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("begin"),
            st.integers(0, NUM_SLOTS - 1),
            st.integers(1, 20),
            st.integers(0, 3),
            st.sampled_from(["", "", "salt"]),
        ),
        st.tuples(st.just("end"), st.integers(0, NUM_SLOTS - 1)),
        st.tuples(st.just("flush")),
    ),
    max_size=60,
)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("reports_isolated", [False, True])
@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_events_rebuild_the_index(
    is_plain: bool, reports_isolated: bool, operations: list[tuple[Any, ...]]
) -> None:
    cache = Cache(is_plain=is_plain, reports_isolated=reports_isolated)
    for kind, *arguments in operations:
        if kind == "begin":
            slot, length, first, salt = arguments
            cache.begin(slot, [first + at // 9 for at in range(length)], salt)
        elif kind == "end":
            cache.end(*arguments)
        else:
            cache.cache.flush()
        assert cache.tree.blocks == cache.findable()
        assert cache.cache.check_integrity() == []


def test_hashes_are_the_same_on_every_server() -> None:
    trees = []
    for key in (bytes(16), bytes(range(16, 32))):
        cache = Cache(hash_key=key)
        cache.begin(0, list(range(12)))
        cache.end(0)
        cache.begin(1, list(range(8)) + [50] * 8)
        trees.append(cache.tree.blocks)
    assert trees[0] == trees[1]
    assert len(trees[0]) == 5


def test_isolated_blocks_are_reported_only_if_asked_for() -> None:
    for reports_isolated in (False, True):
        cache = Cache(reports_isolated=reports_isolated)
        cache.begin(0, list(range(8)), salt="a tenant's")
        assert len(cache.tree.blocks) == (2 if reports_isolated else 0)


def test_a_chain_is_one_event_and_its_continuation_names_its_parent() -> None:
    cache = Cache()
    events: list[BlockEvent] = []
    cache.cache._events = type(
        "Events", (), {"reports_isolated": False, "put": staticmethod(events.append)}
    )()
    cache.begin(0, list(range(8)))
    cache.begin(1, list(range(12)))
    first, second = events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.parent, len(first.hashes), first.token_ids) == (None, 2, tuple(range(8)))
    assert (second.parent, second.token_ids) == (first.hashes[-1], (8, 9, 10, 11))
    assert all(0 <= hash_ < 2**64 for hash_ in (*first.hashes, *second.hashes))
