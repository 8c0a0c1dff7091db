"""Lineage: the last description of a block counts."""

from __future__ import annotations

import numpy as np

from quire.cache.lineage import Lineage


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def describe(lineage: Lineage, block: int, depth: int) -> None:
    lineage.describe(
        ints(block),
        parents=np.full((1, 2), depth, np.uint64),
        tokens=np.full((1, 4), depth, np.int32),
        depths=ints(depth),
        owners=ints(10 * depth),
    )


def test_a_block_described_again_is_what_it_was_last() -> None:
    lineage = Lineage(num_blocks=8, block_size=4)
    for depth in range(1, 40):
        describe(lineage, depth % 2, depth)
    assert (lineage.depths[:2].tolist(), lineage.owners[:2].tolist()) == ([38, 39], [380, 390])
    anywhere = np.ones(8, np.bool_)
    assert lineage.agreement(np.full(2, 39, np.uint64), ints(39, 39, 1), anywhere) == 2
    assert lineage.agreement(np.full(2, 37, np.uint64), ints(37), anywhere) is None


def test_a_block_that_was_found_and_described_again_has_no_hits() -> None:
    lineage = Lineage(num_blocks=8, block_size=4)
    describe(lineage, 3, 1)
    lineage.found(ints(3))
    assert lineage.hits[3] == 1
    assert lineage.top_found(np.ones(8, np.bool_), 4).tolist() == [3]
    describe(lineage, 3, 2)
    assert lineage.hits[3] == 0
    assert lineage.top_found(np.ones(8, np.bool_), 4).tolist() == []
