"""BlockPool: who is free, who goes first, and a model of it in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import CapacityError
from quire.cache.pool import BlockPool


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_fresh_pool_hands_out_its_blocks_from_the_first_on() -> None:
    pool = BlockPool(5)
    blocks, evicted = pool.allocate(3)
    assert blocks.tolist() == [0, 1, 2]
    assert evicted.tolist() == []
    assert pool.num_free == 2


def test_asking_for_more_than_is_free_is_an_error_that_names_both_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 KV blocks were asked for and 1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least one"):
        BlockPool(0)


def test_findable_blocks_are_handed_out_last_and_the_longest_free_first() -> None:
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


def test_a_findable_free_block_that_is_used_again_counts_as_freshly_used() -> None:
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


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=80))
def test_the_pool_behaves_like_its_plain_model(num_blocks: int, operations: list) -> None:
    """The model: a list of references, a list of plain free blocks, a list of aged ones."""
    pool = BlockPool(num_blocks)
    references = [0] * num_blocks
    aged: list[int] = []
    for kind, number in operations:
        block = number % num_blocks
        if kind == 0 and pool.num_free:
            blocks, evicted = pool.allocate(1 + number % pool.num_free)
            for taken in blocks.tolist():
                assert references[taken] == 0
                references[taken] = 1
            assert evicted.tolist() == aged[: len(evicted)]
            assert len(evicted) == 0 or len(aged) + sum(references) >= num_blocks
            del aged[: len(evicted)]
        elif kind == 1 and references[block]:
            references[block] -= 1
            pool.release(ints(block))
            if references[block] == 0 and pool.findable[block]:
                aged.append(block)
        elif kind == 2 and (references[block] or block in aged):
            if block in aged:
                aged.remove(block)
            references[block] += 1
            pool.share(ints(block))
        elif kind == 3 and references[block]:
            pool.findable[block] = True
        assert pool.references.tolist() == references
        plain, findable = pool.free_blocks()
        assert findable.tolist() == aged
        assert sorted(plain.tolist() + aged) == [b for b in range(num_blocks) if not references[b]]
        assert pool.num_free == len(plain) + len(aged)


def test_the_queue_of_findable_blocks_never_outgrows_its_array() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.findable[:] = True
    pool.release(ints(0, 1, 2, 3))
    for turn in range(50):
        pool.share(ints(turn % 4))
        pool.release(ints(turn % 4))
    assert pool.allocate(4)[1].tolist() == [2, 3, 0, 1]


def test_rebuilding_takes_references_from_outside_and_keeps_the_age_of_findable_blocks() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.findable[[1, 3]] = True
    pool.release(ints(3, 1))
    pool.rebuild(ints(0, 0, 2, 0, 1))
    assert pool.num_free == 3
    assert pool.free_blocks()[0].tolist() == [0]
    assert pool.free_blocks()[1].tolist() == [3, 1]
