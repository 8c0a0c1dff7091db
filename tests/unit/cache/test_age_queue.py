"""AgeQueue: oldest first, removal from the middle, and bounded arrays."""

from __future__ import annotations

import numpy as np

from quire.cache.age_queue import AgeQueue


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_the_oldest_are_taken_first_and_removed_ones_are_skipped() -> None:
    queue = AgeQueue(6)
    queue.push(ints(4, 1))
    queue.push(ints(3, 0, 5))
    queue.take(ints(1, 0))
    assert (len(queue), queue.blocks().tolist()) == (3, [4, 3, 5])
    assert queue.pop(2).tolist() == [4, 3]
    assert queue.pop(0).tolist() == []
    assert queue.clear().tolist() == [5]
    assert len(queue) == 0


def test_a_block_that_returns_is_the_youngest() -> None:
    queue = AgeQueue(3)
    queue.push(ints(0, 1, 2))
    for turn in range(50):
        queue.take(ints(turn % 3))
        queue.push(ints(turn % 3))
    assert queue.pop(3).tolist() == [2, 0, 1]
