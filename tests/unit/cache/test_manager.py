"""CacheManager: sharing, forking, registering, holding, and the audit of its metadata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import CapacityError
from quire.cache import plain_digest
from quire.cache.block_operations import PlainBlockOperations
from quire.cache.manager import CacheManager


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def steps(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Books:
    """A manager with the tokens of its slots, as the scheduler keeps them."""

    def __init__(self, num_blocks: int = 8, block_size: int = 4, num_slots: int = 4) -> None:
        self.cache = CacheManager(num_blocks, block_size, prefix_caching=True)
        self.cache.lay_out(num_slots=num_slots, max_tokens=num_blocks * block_size)
        self.tokens = np.zeros((num_slots, num_blocks * block_size), np.int32)

    def begin(self, slot: int, token_ids: list[int], salt: str = "") -> int:
        """Admit and compute everything; return how many blocks were found."""
        cache = self.cache
        chain = cache.chain(np.array(token_ids, np.int32), salt)
        assert chain is not None
        match = cache.match(chain)
        cache.attach(slot, match)
        short = cache.blocks_short(ints(slot), ints(len(token_ids)))
        if short[0]:
            cache.allocate(ints(slot), short)
        self.tokens[slot, : len(token_ids)] = token_ids
        cache.register(ints(slot), ints(len(token_ids)), self.tokens)
        assert cache.check_integrity() == []
        return match.num_blocks

    def end(self, *slots: int, last_step: int = 0) -> int:
        freed = self.cache.free(ints(*slots), np.full(len(slots), last_step, np.int64))
        assert self.cache.check_integrity() == []
        return freed


def test_blocks_short_counts_the_blocks_missing_for_a_length() -> None:
    books = Books()
    books.begin(0, list(range(5)))
    lengths = ints(5, 8, 9, 16)
    assert books.cache.blocks_short(ints(0, 0, 0, 0), lengths).tolist() == [0, 0, 1, 2]


def test_a_running_request_shares_its_computed_full_blocks() -> None:
    books = Books()
    assert books.begin(0, list(range(10))) == 0
    assert books.begin(1, list(range(10))) == 2
    assert books.cache.tables.row(0)[:2].tolist() == books.cache.tables.row(1)[:2].tolist()
    assert books.cache.tables.row(0)[2] != books.cache.tables.row(1)[2]
    assert books.cache.num_free == 4


def test_blocks_of_an_ended_request_are_found_until_reallocated() -> None:
    books = Books()
    books.begin(0, list(range(12)))
    assert books.end(0) == 3
    assert books.cache.num_free == 8
    assert books.begin(1, list(range(9))) == 2
    books.end(1)
    books.begin(2, list(range(100, 132)))
    books.end(2)
    assert books.begin(3, list(range(12))) == 0


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    books = Books()
    books.begin(0, list(range(32)))
    books.end(0)
    books.begin(1, list(range(100, 112)))
    chain = books.cache.chain(np.arange(32, dtype=np.int32), "")
    assert chain is not None
    assert books.cache.match(chain).num_blocks == 5


def test_a_prefix_found_again_outlives_any_number_of_those_used_once() -> None:
    books = Books(num_blocks=10)
    for _ in range(2):
        books.begin(0, list(range(9)))
        books.end(0)
    for scan in range(1, 12):
        books.begin(0, list(range(100 * scan, 100 * scan + 32)))
        books.end(0)
    assert books.begin(0, list(range(9))) == 2


def test_a_prefix_used_once_is_evicted_for_the_next_one() -> None:
    books = Books(num_blocks=10)
    books.begin(0, list(range(9)))
    books.end(0)
    for scan in range(1, 3):
        books.begin(0, list(range(100 * scan, 100 * scan + 32)))
        books.end(0)
    assert books.begin(0, list(range(9))) == 0


def test_a_block_recomputed_after_its_eviction_is_protected() -> None:
    books = Books(num_blocks=10)
    books.begin(0, list(range(8)))
    books.end(0)
    books.begin(0, list(range(100, 140)))
    books.end(0)
    assert books.begin(0, list(range(8))) == 0
    books.end(0)
    assert books.cache.pool.num_free_protected == 2
    books.begin(0, list(range(200, 232)))
    books.end(0)
    assert books.begin(0, list(range(8))) == 2


def test_a_preempted_requests_hit_on_its_own_blocks_counts_as_used_once() -> None:
    books = Books(num_blocks=10)
    books.begin(0, list(range(8)))
    books.end(0)
    chain = books.cache.chain(np.arange(8, dtype=np.int32), "")
    assert chain is not None
    books.cache.attach(0, books.cache.match(chain), returned=True)
    books.end(0)
    assert books.cache.pool.num_free_protected == 0


def test_a_preempted_requests_recomputation_counts_as_used_once() -> None:
    books = Books(num_blocks=10)
    books.begin(0, list(range(8)))
    books.end(0)
    books.begin(0, list(range(100, 140)))
    books.end(0)
    chain = books.cache.chain(np.arange(8, dtype=np.int32), "")
    assert chain is not None
    books.cache.attach(0, books.cache.match(chain), returned=True)
    books.cache.extend(0, 8)
    books.cache.register(ints(0), ints(8), books.tokens * 0 + np.arange(40, dtype=np.int32))
    books.end(0)
    assert books.cache.pool.num_free_protected == 0
    assert books.begin(1, list(range(8))) == 2


def test_after_a_flush_neither_ended_nor_running_requests_are_found() -> None:
    books = Books(num_blocks=12)
    books.begin(0, list(range(8)))
    books.end(0)
    books.begin(0, list(range(20, 30)))
    assert books.cache.flush() == 4
    assert books.cache.check_integrity() == []
    books.cache.fork(0, 1, 10)
    books.tokens[0, :12] = books.tokens[1, :12] = range(20, 32)
    books.cache.register(ints(0, 1), ints(12, 12), books.tokens)
    books.end(0, 1)
    assert books.cache.num_free == 12
    assert books.cache.pool.num_free_findable == 0
    assert books.begin(0, list(range(20, 32))) == 0
    assert books.begin(1, list(range(20, 32))) == 3


def test_another_model_finds_nothing_under_the_same_key() -> None:
    first = CacheManager(4, 4, prefix_caching=True, fingerprint="one")
    second = CacheManager(4, 4, prefix_caching=True, fingerprint="two")
    tokens = np.arange(8, dtype=np.int32)
    chains = first.chain(tokens, ""), second.chain(tokens, "")
    assert chains[0] is not None
    assert chains[1] is not None
    assert not set(chains[0].keys) & set(chains[1].keys)


def test_another_salt_finds_nothing() -> None:
    books = Books()
    books.begin(0, list(range(8)), salt="one")
    assert books.begin(1, list(range(8)), salt="two") == 0
    assert books.begin(2, list(range(8)), salt="one") == 2


def test_only_computed_blocks_are_registered() -> None:
    books = Books()
    cache = books.cache
    chain = cache.chain(np.arange(12, dtype=np.int32), "")
    assert chain is not None
    cache.attach(0, cache.match(chain))
    cache.allocate(ints(0), ints(3))
    books.tokens[0, :12] = np.arange(12)
    for computed, found in ((3, 0), (4, 1), (7, 1), (11, 2), (12, 3)):
        cache.register(ints(0), ints(computed), books.tokens)
        assert cache.match(chain).num_blocks == found


def test_registering_in_parts_gives_the_digests_of_the_whole_chain() -> None:
    books = Books()
    cache, seen = books.cache, []
    chain = cache.chain(np.arange(16, dtype=np.int32), "")
    assert chain is not None
    cache.attach(0, cache.match(chain))
    cache.allocate(ints(0), ints(4))
    books.tokens[0, :16] = np.arange(16)
    for computed in (5, 9, 16):
        cache.register(ints(0), ints(computed), books.tokens)
        seen = [cache.index.key_of(block) for block in cache.tables.row(0).tolist()]
    assert seen == list(chain.keys)


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    cache = CacheManager(4, 4, prefix_caching=False)
    cache.lay_out(num_slots=2, max_tokens=16)
    assert cache.chain(np.arange(8, dtype=np.int32), "") is None
    cache.allocate(ints(0), ints(2))
    cache.register(ints(0), ints(8), np.zeros((2, 16), np.int32))
    assert len(cache.index) == 0
    assert cache.free(ints(0), steps(0)) == 2
    assert cache.pool.num_free_findable == 0


def test_blocks_are_digested_once() -> None:
    calls = []

    def counting(*arguments: object) -> np.ndarray:
        calls.append(len(arguments[0][0]) // 2)  # type: ignore[index]
        return plain_digest.hash_chains(*arguments)  # type: ignore[arg-type]

    def operations(*parts: Any) -> PlainBlockOperations:
        return PlainBlockOperations(*parts, hash_blocks=counting)

    cache = CacheManager(8, 2, prefix_caching=True, operations=operations)
    cache.lay_out(num_slots=4, max_tokens=16)
    tokens = np.arange(64, dtype=np.int32).reshape(4, 16)
    chain = cache.chain(tokens[0, :4], "")
    assert chain is not None
    cache.attach(0, cache.match(chain))
    cache.allocate(ints(0, 1, 2), ints(3, 2, 2))
    cache.register(ints(0, 1, 2), ints(4, 3, 1), tokens)
    assert calls == [1]  # the two blocks of slot 0 were digested while its request waited
    cache.register(ints(0, 1, 2), ints(4, 3, 1), tokens)
    assert calls == [1]
    cache.register(ints(0, 1, 2), ints(6, 4, 1), tokens)
    assert calls == [1, 1, 1]


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    books = Books()
    books.begin(0, list(range(10)))
    copy_from, copy_to = books.cache.fork(0, 1, 10)
    entries = books.cache.entries(1)
    source, target = books.cache.tables.row(0).tolist(), books.cache.tables.row(1).tolist()
    assert target[:2] == source[:2]
    assert copy_from.tolist() == [source[2]]
    assert copy_to.tolist() == [target[2]]
    assert entries.blocks.tolist() == target
    assert entries.columns.tolist() == [0, 1, 2]
    assert books.cache.check_integrity() == []


def test_after_a_flush_branches_offer_nothing_to_the_index() -> None:
    books = Books()
    books.begin(0, list(range(10)))
    books.cache.flush()
    books.cache.branch([0, 0], [0, 1], 10, step=1)
    books.cache.register(ints(0, 1), ints(10, 10), books.tokens)
    assert len(books.cache.index) == 0


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    books = Books()
    books.begin(0, list(range(8)))
    copy_from, _ = books.cache.fork(0, 1, 8)
    assert len(books.cache.tables.row(1)) == 2
    assert len(copy_from) == 0
    assert books.cache.num_free == 6


def test_blocks_filled_by_a_fork_extend_the_chain_of_the_prompt() -> None:
    books = Books()
    books.begin(0, list(range(10)))
    books.cache.fork(0, 1, 10)
    books.tokens[1, :12] = [*range(10), 50, 51]
    books.cache.register(ints(1), ints(12), books.tokens)
    chain = books.cache.chain(books.tokens[1, :12].copy(), "")
    assert chain is not None
    assert books.cache.match(chain).blocks.tolist() == books.cache.tables.row(1).tolist()


def test_a_fork_of_a_request_with_duplicate_blocks_keeps_the_chain_right() -> None:
    books = Books()
    cache = books.cache
    for slot in (0, 1):  # both compute the same prompt before either is registered
        cache.attach(slot, cache.match(cache.chain(ints(), "")))  # type: ignore[arg-type]
        cache.allocate(ints(slot), ints(1))
        books.tokens[slot, :4] = [1, 2, 3, 4]
    cache.register(ints(0, 1), ints(4, 4), books.tokens)
    cache.fork(1, 2, 4)
    books.tokens[2, :8] = [1, 2, 3, 4, 5, 6, 7, 8]
    cache.allocate(ints(2), ints(1))
    cache.register(ints(2), ints(8), books.tokens)
    chain = cache.chain(books.tokens[2, :8].copy(), "")
    assert chain is not None
    assert cache.match(chain).num_blocks == 2
    assert cache.check_integrity() == []


def test_blocks_named_by_a_step_in_flight_are_freed_only_after_it() -> None:
    books = Books()
    books.begin(0, list(range(8)))
    books.begin(1, list(range(20, 28)))
    assert books.cache.free(ints(0, 1), steps(3, 0)) == 2
    assert books.cache.num_free == 6
    assert books.cache.check_integrity() == []
    assert books.cache.settle(2) == 0
    assert books.cache.settle(3) == 2
    assert books.cache.num_free == 8


def test_a_held_block_can_still_be_found_and_shared() -> None:
    books = Books()
    books.begin(0, list(range(8)))
    books.end(0, last_step=1)
    assert books.begin(1, list(range(8))) == 2
    books.cache.settle(1)
    assert books.cache.check_integrity() == []
    assert books.cache.num_free == 6


def test_a_held_copy_source_is_not_reallocated() -> None:
    books = Books(num_blocks=3)
    books.begin(0, list(range(4)))
    block = books.cache.tables.row(0).copy()
    books.cache.hold(block, step=5)
    books.end(0)
    assert books.cache.num_free == 2
    books.cache.settle(5)
    assert books.cache.num_free == 3


def test_allocating_too_much_is_rejected_and_changes_nothing() -> None:
    books = Books()
    assert books.cache.can_allocate(8)
    assert not books.cache.can_allocate(9)
    with pytest.raises(CapacityError):
        books.cache.allocate(ints(0, 1), ints(5, 4))
    assert books.cache.check_integrity() == []
    assert books.cache.num_free == 8


def test_the_audit_names_each_kind_of_contradiction() -> None:
    def spoiled(spoil) -> str:
        books = Books()
        books.begin(0, list(range(8)))
        books.begin(1, list(range(20, 26)))
        books.end(1)
        spoil(books.cache)
        return " ".join(books.cache.check_integrity())

    def leak(cache: CacheManager) -> None:
        cache.tables.take(ints(0))

    def lose(cache: CacheManager) -> None:
        cache.pool.references[cache.tables.row(0)[0]] = 0

    def unmark(cache: CacheManager) -> None:
        cache.pool.findable[cache.tables.row(0)[0]] = False

    def shorten(cache: CacheManager) -> None:
        cache.tables.counts[0] = 1

    def free_twice(cache: CacheManager) -> None:
        cache.pool._push_stack(cache.pool.free_blocks()[0][:1])

    assert "leaked" in spoiled(leak)
    assert "fewer references" in spoiled(lose)
    assert "neither free nor in use" in spoiled(lose)
    assert "findable" in spoiled(unmark)
    assert "tables" in spoiled(shorten)
    assert "more than once" in spoiled(free_twice)
    assert spoiled(lambda cache: None) == ""


def test_the_audit_names_the_request_that_last_held_a_wrong_block() -> None:
    books = Books()
    for slot, name in enumerate(("first", "second")):
        books.cache.name_slot(slot, name)
    books.begin(0, list(range(8)))
    books.begin(1, list(range(20, 26)))
    books.cache.tables.take(ints(1))
    (leak, *_) = books.cache.check_integrity()
    assert leak.endswith("last held by second")
    assert books.cache.check_integrity(quick=True, repair=True)
    assert books.cache.check_integrity() == []
    assert books.cache.check_integrity(quick=True) == []


def test_the_audit_repairs_a_leak_and_loses_nothing() -> None:
    books = Books()
    books.begin(0, list(range(8)))
    books.begin(1, list(range(20, 30)))
    books.cache.tables.take(ints(1))
    assert books.cache.num_free == 3
    assert books.cache.check_integrity(repair=True)
    assert books.cache.check_integrity() == []
    assert books.cache.num_free == 6
    assert books.begin(2, list(range(20, 30))) == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 14), st.integers(0, 3)),
        max_size=40,
    )
)
def test_the_audit_passes_after_any_sequence_of_operations(operations: list) -> None:
    """A match always leads to blocks filled with exactly those tokens under the same salt since the
    last flush. Flavours 2 and 3 are 0 and 1 under another salt.
    """
    books = Books(num_blocks=7, block_size=2)
    cache, busy, step = books.cache, set(), 0
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    num_flushes = 0

    def fill(slot: int, length: int, salt: str) -> None:
        for column, block in enumerate(cache.tables.row(slot).tolist()):
            if (column + 1) * 2 <= length:
                known = tuple(books.tokens[slot, : (column + 1) * 2].tolist())
                content[block] = (f"{salt} {num_flushes}", known)

    for kind, slot, length, flavour in operations:
        token_ids, salt = [flavour % 2] * length, "ab"[flavour // 2]
        if kind == 0 and slot not in busy:
            chain = cache.chain(np.array(token_ids, np.int32), salt)
            assert chain is not None
            match = cache.match(chain)
            for column, block in enumerate(match.blocks.tolist()):
                known = tuple(token_ids[: (column + 1) * 2])
                assert content[block] == (f"{salt} {num_flushes}", known)
            lacking = -(-length // 2) - match.num_blocks
            if lacking <= cache.num_takeable(match):
                books.begin(slot, token_ids, salt)
                busy.add(slot)
                fill(slot, length, salt)
        elif kind in (1, 2) and slot in busy:
            step += 1
            books.end(slot, last_step=step if kind == 1 else 0)
            busy.discard(slot)
        elif kind == 3:
            cache.settle(step)
        elif kind == 5 and length == 14:
            cache.flush()
            num_flushes += 1
        elif kind == 4 and slot in busy and cache.num_free and (slot + 1) % 4 not in busy:
            target = (slot + 1) % 4
            shared = min(length, int(cache.capacities[slot]))
            books.tokens[target] = books.tokens[slot]
            copy_from, copy_to = cache.fork(slot, target, shared)
            cache.hold(copy_from, step)
            assert len(copy_from) == len(copy_to)
            busy.add(target)
        assert cache.check_integrity() == []
    books.end(*busy)
    cache.settle(step)
    assert cache.num_free == 7
