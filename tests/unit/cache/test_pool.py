"""BlockPool: free blocks, eviction order, and a plain Python model of both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import CapacityError
from quire.cache.pool import BlockPool


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_fresh_pool_allocates_its_blocks_from_the_first_on() -> None:
    pool = BlockPool(5)
    blocks, evicted = pool.allocate(3)
    assert blocks.tolist() == [0, 1, 2]
    assert evicted.tolist() == []
    assert pool.num_free == 2


def test_never_allocated_blocks_are_taken_last() -> None:
    pool = BlockPool(6)
    assert pool.num_never_used == 6
    blocks, _ = pool.allocate(3)
    pool.release(blocks)
    again, _ = pool.allocate(2)
    assert again.tolist() == [0, 1]
    assert pool.num_never_used == 3
    pool.rebuild(pool.references.copy())
    assert pool.allocate(2)[0].tolist() == [2, 3]
    assert pool.num_never_used == 2


def test_allocating_more_than_free_is_an_error_with_both_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks were asked for and 1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_pool_without_blocks_is_rejected() -> None:
    with pytest.raises(CapacityError, match="at least one"):
        BlockPool(0)


def test_findable_blocks_are_allocated_last_and_longest_free_first() -> None:
    pool = BlockPool(6)
    pool.allocate(6)
    pool.findable[[1, 2, 4]] = True
    for block in (2, 0, 4, 1, 3):
        pool.release(ints(block))
    assert pool.num_free_findable == 3
    blocks, evicted = pool.allocate(4)
    assert sorted(blocks[:2].tolist()) == [0, 3]
    assert blocks[2:].tolist() == evicted.tolist() == [2, 4]
    assert not pool.findable[[2, 4]].any()
    assert pool.allocate(1)[1].tolist() == [1]


def test_a_reused_findable_block_counts_as_freshly_used() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.findable[:] = True
    pool.release(ints(0, 1, 2))
    pool.share(ints(0))
    assert pool.num_free == 2
    pool.release(ints(0))
    assert pool.allocate(3)[1].tolist() == [1, 2, 0]


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    blocks, _ = pool.allocate(1)
    pool.share(blocks)
    assert pool.release(blocks) == 0
    assert pool.num_free == 1
    assert pool.release(blocks) == 1
    assert pool.num_free == 2


def test_a_block_released_twice_in_one_call_becomes_free_once() -> None:
    pool = BlockPool(3)
    blocks, _ = pool.allocate(2)
    pool.share(blocks)
    assert pool.release(np.concatenate((blocks, blocks))) == 2
    assert sorted(pool.allocate(3)[0].tolist()) == [0, 1, 2]


def test_blocks_used_again_are_allocated_after_all_used_once() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.findable[:] = True
    pool.protect(ints(0, 3))
    pool.release(ints(3, 0, 1, 2, 4))
    assert pool.num_free_protected == 2
    assert pool.allocate(4)[1].tolist() == [1, 2, 4, 3]
    assert pool.protected.tolist() == [True, False, False, False, False]


def test_beyond_their_share_the_oldest_lose_their_protection() -> None:
    pool = BlockPool(5, protected_share=0.4)
    pool.allocate(5)
    pool.findable[:] = True
    pool.protect(ints(0, 1, 2))
    pool.release(ints(4))
    pool.release(ints(2, 1))
    pool.release(ints(0))
    assert pool.protected_blocks().tolist() == [1, 0]
    assert not pool.protected[2]
    pool.release(ints(3))
    assert pool.allocate(5)[1].tolist() == [4, 2, 3, 1, 0]


def test_a_cleared_pool_has_only_plain_blocks() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.findable[:] = True
    pool.protect(ints(1, 2))
    pool.release(ints(0, 1))
    pool.forget_all()
    assert (pool.num_free, pool.num_free_findable, pool.num_free_protected) == (2, 0, 0)
    pool.release(ints(2, 3))
    assert pool.num_free_findable == 0
    assert sorted(pool.allocate(4)[0].tolist()) == [0, 1, 2, 3]


_OPERATIONS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8)), max_size=80)


@given(st.integers(1, 9), st.sampled_from((0.0, 0.3, 0.8, 1.0)), _OPERATIONS)
def test_the_pool_behaves_like_its_plain_model(
    num_blocks: int, share: float, operations: list
) -> None:
    """The model: a list of references, and lists of blocks used once, again and pinned, by age."""
    pool = BlockPool(num_blocks, protected_share=share)
    references, protected = [0] * num_blocks, [False] * num_blocks
    pinned, kept = [False] * num_blocks, list[int]()
    once: list[int] = []
    again: list[int] = []
    for kind, number in operations:
        block = number % num_blocks
        if kind == 0 and pool.num_free:
            blocks, evicted = pool.allocate(1 + number % pool.num_free)
            for taken in blocks.tolist():
                assert references[taken] == 0
                references[taken] = 1
            assert evicted.tolist() == (once + again + kept)[: len(evicted)]
            for taken in evicted.tolist():
                protected[taken] = pinned[taken] = False
                for queue in (once, again, kept):
                    if taken in queue:
                        queue.remove(taken)
        elif kind == 1 and references[block]:
            references[block] -= 1
            pool.release(ints(block))
            if references[block] == 0 and pool.findable[block]:
                queue = kept if pinned[block] else again if protected[block] else once
                queue.append(block)
            while len(again) > int(share * num_blocks):
                protected[again[0]] = False
                once.append(again.pop(0))
        elif kind == 2 and (references[block] or block in once + again + kept):
            for queue in (once, again, kept):
                if block in queue:
                    queue.remove(block)
            references[block] += 1
            pool.share(ints(block))
        elif kind == 3 and references[block]:
            pool.findable[block] = True
        elif kind == 4 and references[block] and pool.findable[block]:
            protected[block] = True
            pool.protect(ints(block))
        elif kind == 5 and number == 8:
            once, again, kept, protected = [], [], [], [False] * num_blocks
            pinned = [False] * num_blocks
            pool.forget_all()
        elif kind == 6 and pool.findable[block]:
            pool.pin(ints(block))
            if not pinned[block] and not references[block]:
                (again if protected[block] else once).remove(block)
                kept.append(block)
            pinned[block] = True
        elif kind == 7 and pinned[block]:
            pool.unpin(ints(block).astype(np.intp))
            pinned[block] = False
            if not references[block]:
                kept.remove(block)
                (again if protected[block] else once).append(block)
                while protected[block] and len(again) > int(share * num_blocks):
                    protected[again[0]] = False
                    once.append(again.pop(0))
        assert pool.references.tolist() == references
        assert pool.protected.tolist() == protected
        plain, findable = pool.free_blocks()
        assert findable.tolist() == once + again + kept
        assert pool.pinned.tolist() == pinned
        assert sorted(plain.tolist() + once + again + kept) == [
            b for b in range(num_blocks) if not references[b]
        ]
        assert pool.num_free == len(plain) + len(once) + len(again) + len(kept)


def test_the_queue_of_findable_blocks_has_a_bounded_array() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.findable[:] = True
    pool.release(ints(0, 1, 2, 3))
    for turn in range(50):
        pool.share(ints(turn % 4))
        pool.release(ints(turn % 4))
    assert pool.allocate(4)[1].tolist() == [2, 3, 0, 1]


def test_rebuilding_takes_external_references_and_keeps_the_age_of_findable_blocks() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.findable[[1, 3]] = True
    pool.release(ints(3, 1))
    pool.rebuild(ints(0, 0, 2, 0, 1))
    assert pool.num_free == 3
    assert pool.free_blocks()[0].tolist() == [0]
    assert pool.free_blocks()[1].tolist() == [3, 1]


def test_rebuilding_keeps_blocks_used_again() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.findable[[1, 3, 4]] = True
    pool.protect(ints(3, 4))
    pool.release(ints(3, 1))
    pool.rebuild(ints(1, 0, 1, 0, 0))
    assert pool.free_blocks()[1].tolist() == [1, 3, 4]
    assert pool.protected_blocks().tolist() == [3, 4]
