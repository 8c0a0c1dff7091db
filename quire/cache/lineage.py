"""Lineage: what each findable block stands for and how often it was found.

Written in bulk when blocks are registered and found; read only for reports on misses and on what
the cache holds. Knows no digest index and decides nothing. What is recorded of a block that is not
findable (any more) is stale; callers pass a mask of those that are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.digest import Uint64s

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Ints = Int32s | Int64s
Bools = NDArray[np.bool_]

# Descriptions of so many steps are written together.
_AT_ONCE = 16


class Lineage:
    """Of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._parents: Uint64s = np.zeros((num_blocks, 2), np.uint64)
        self._tokens: Int32s = np.zeros((num_blocks, block_size), np.int32)
        self._depths: Int32s = np.zeros(num_blocks, np.int32)  # blocks of the chain it ends
        self._owners: Int32s = np.zeros(num_blocks, np.int32)
        self._hits: Int64s = np.zeros(num_blocks, np.int64)
        self._ends: Bools = np.zeros(num_blocks, np.bool_)  # where a prefix that was found ended
        # Described, and not written yet: steps describe a few dozen blocks each.
        self._fresh: list[tuple[Ints, Uint64s, Int32s, Ints, Int32s]] = []

    @property
    def depths(self) -> Int32s:
        """Blocks of the chain that each ends, its own included."""
        self._write_fresh()
        return self._depths

    @property
    def owners(self) -> Int32s:
        """The number of the owner that computed each (owners.py)."""
        self._write_fresh()
        return self._owners

    @property
    def hits(self) -> Int64s:
        """How often each was found."""
        self._write_fresh()
        return self._hits

    def describe(
        self, blocks: Ints, *, parents: Uint64s, tokens: Int32s, depths: Ints, owners: Int32s
    ) -> None:
        """Describe `blocks`, which become findable now."""
        self._fresh.append((blocks, parents, tokens, depths, owners))
        if len(self._fresh) >= _AT_ONCE:
            self._write_fresh()

    def found(self, blocks: Int32s) -> None:
        """Count a chain of blocks that was found, in this order."""
        self._write_fresh()
        self._hits[blocks] += 1
        self._ends[blocks[-1]] = True

    def agreement(self, parent: Uint64s, tokens: Int32s, findable: Bools) -> int | None:
        """Return how many of `tokens` the most similar block after `parent` begins with.

        None where no block comes after it.
        """
        self._write_fresh()
        children = np.flatnonzero(
            findable & (self._parents[:, 0] == parent[0]) & (self._parents[:, 1] == parent[1])
        )
        if not len(children):
            return None
        differs = self._tokens[children, : len(tokens)] != tokens
        agreed = np.where(differs.any(axis=1), differs.argmax(axis=1), len(tokens))
        return int(agreed.max())

    def top_found(self, findable: Bools, count: int) -> Int32s:
        """Return the `count` blocks that end the prefixes which saved most tokens, most first."""
        self._write_fresh()
        ends = np.flatnonzero(findable & self._ends)
        spared = self._hits[ends] * self._depths[ends]
        order = np.argsort(-spared, kind="stable")[:count]
        return ends[order].astype(np.int32)

    def _write_fresh(self) -> None:
        """Write what was described, in that order: a block may be described twice."""
        if not self._fresh:
            return
        blocks, parents, tokens, depths, owners = map(
            np.concatenate, zip(*self._fresh, strict=True)
        )
        self._fresh.clear()
        self._parents[blocks] = parents
        self._tokens[blocks] = tokens
        self._depths[blocks] = depths
        self._owners[blocks] = owners
        self._hits[blocks] = 0
        self._ends[blocks] = False
