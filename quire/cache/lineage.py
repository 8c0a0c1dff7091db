"""Lineage: what each findable block stands for and how often it was found.

Written in bulk when blocks are registered and found; read only for reports on misses and on what
the cache holds. Knows no digest index and decides nothing. What is recorded of a block that is not
findable (any more) is stale; callers pass a mask of those that are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.chain import Uint64s

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Ints = Int32s | Int64s
Bools = NDArray[np.bool_]


class Lineage:
    """The chains of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.parents: Uint64s = np.zeros((num_blocks, 2), np.uint64)
        self.tokens: Int32s = np.zeros((num_blocks, block_size), np.int32)
        self.depths: Int32s = np.zeros(num_blocks, np.int32)  # blocks of the chain it ends
        self.owners: Int32s = np.zeros(num_blocks, np.int32)
        self.hits: Int64s = np.zeros(num_blocks, np.int64)
        self.ends: Bools = np.zeros(num_blocks, np.bool_)  # where a prefix that was found ended

    def describe(
        self, blocks: Ints, *, parents: Uint64s, tokens: Int32s, depths: Ints, owners: Int32s
    ) -> None:
        """Describe `blocks`, which become findable now."""
        self.parents[blocks] = parents
        self.tokens[blocks] = tokens
        self.depths[blocks] = depths
        self.owners[blocks] = owners
        self.hits[blocks] = 0
        self.ends[blocks] = False

    def found(self, blocks: Int32s) -> None:
        """Count a chain of blocks that was found, in this order."""
        self.hits[blocks] += 1
        self.ends[blocks[-1]] = True

    def agreement(self, parent: Uint64s, tokens: Int32s, findable: Bools) -> int | None:
        """Return how many of `tokens` the most similar block after `parent` begins with.

        None where no block comes after it.
        """
        children = np.flatnonzero(
            findable & (self.parents[:, 0] == parent[0]) & (self.parents[:, 1] == parent[1])
        )
        if not len(children):
            return None
        differs = self.tokens[children, : len(tokens)] != tokens
        agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), len(tokens))
        return int(agreed.max())

    def top_found(self, findable: Bools, count: int) -> Int32s:
        """Return the `count` blocks that end the prefixes which saved most tokens, most first."""
        ends = np.flatnonzero(findable & self.ends)
        spared = self.hits[ends] * self.depths[ends]
        order = np.argsort(-spared, kind="stable")[:count]
        return ends[order].astype(np.int32)
