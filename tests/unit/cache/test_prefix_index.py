"""PrefixIndex: longest match, first registration wins, removal."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.chain import digests_of
from quire.cache.prefix_index import PrefixIndex

KEYS = digests_of([bytes([number]) * 16 for number in range(6)])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_match_ends_at_the_first_unknown_key() -> None:
    index = PrefixIndex(8)
    index.insert(KEYS[[0, 1, 3]], ints(5, 2, 7))
    assert index.table.longest_run(KEYS).tolist() == [5, 2]
    assert index.table.longest_run(KEYS[1:]).tolist() == [2]
    assert index.table.longest_run(KEYS[2:3]).tolist() == []
    assert index.table.longest_run(KEYS[:0]).tolist() == []


def test_the_first_block_under_a_key_stays() -> None:
    index = PrefixIndex(8)
    assert index.insert(KEYS[0:1], ints(5)).tolist() == [0]
    assert index.insert(KEYS[:2], ints(6, 7)).tolist() == [1]
    assert index.table.longest_run(KEYS).tolist() == [5, 7]
    assert index.key_of(6) is None


def test_a_findable_block_keeps_its_key() -> None:
    index = PrefixIndex(8)
    index.insert(KEYS[0:1], ints(5))
    assert index.insert(KEYS[1:2], ints(5)).tolist() == []
    assert index.key_of(5) == KEYS[0].tobytes()
    assert index.problems() == []


def test_a_removed_block_is_not_found_and_its_key_is_reusable() -> None:
    index = PrefixIndex(8)
    index.insert(KEYS[:3], ints(0, 1, 2))
    assert index.forget(ints(1)).tolist() == KEYS[1:2].tolist()
    assert index.table.longest_run(KEYS).tolist() == [0]
    assert len(index) == 2
    assert index.insert(KEYS[1:2], ints(4)).tolist() == [0]
    assert index.table.longest_run(KEYS).tolist() == [0, 4, 2]


def test_a_cleared_index_is_empty_and_accepts_everything() -> None:
    index = PrefixIndex(8)
    index.insert(KEYS[:3], ints(0, 1, 2))
    assert index.clear() == 3
    assert len(index) == 0
    assert index.table.longest_run(KEYS).tolist() == []
    assert index.insert(KEYS[:3], ints(2, 1, 0)).tolist() == [0, 1, 2]
    assert index.problems() == []


def test_removing_an_unknown_block_raises() -> None:
    with pytest.raises(RuntimeError, match="block 3 was evicted"):
        PrefixIndex(8).forget(ints(3))


def test_known_keys_and_keyed_blocks_are_skipped_in_bulk() -> None:
    index = PrefixIndex(8)
    index.insert(KEYS[:2], ints(0, 1))
    # block 1 has a key, KEYS[0] has a block, KEYS[4] comes twice
    new = index.insert(KEYS[[2, 0, 4, 4, 3]], ints(1, 2, 3, 4, 5))
    assert new.tolist() == [2, 4]
    assert np.flatnonzero(index.known).tolist() == [0, 1, 3, 5]
    assert index.table.longest_run(KEYS[[0, 1, 4, 3, 2]]).tolist() == [0, 1, 3, 5]
    assert index.problems() == []


def test_contradictions_between_the_two_directions_are_reported() -> None:
    index = PrefixIndex(4)
    index.insert(KEYS[:2], ints(0, 1))
    index.digests[[2, 3]] = KEYS[[4, 1]]
    index.known[[2, 3]] = True
    assert index.problems() == [
        "prefix index: key of block 2 leads to block None",
        "prefix index: key of block 3 leads to block 1",
        "prefix index: 2 keys but 4 blocks with one",
    ]
