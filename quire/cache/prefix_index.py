"""PrefixIndex: from the digest of a chain of full blocks to the block that holds its last one.

Knows digests (made by quire.cache.chain) and block numbers; neither tokens nor requests. It evicts
nothing by itself: the pool allocates the oldest free block and the manager makes the index forget
it. Always holds: one block per digest, one digest per block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import DigestTable
from quire.cache.age_queue import Index
from quire.cache.chain import Uint64s
from quire.cache.table import Int32s


class PrefixIndex:
    """An index over `num_blocks` blocks, empty at first. table: finds blocks by digest."""

    def __init__(self, num_blocks: int) -> None:
        self.table = DigestTable()
        self.digests: Uint64s = np.zeros((num_blocks, 2), np.uint64)
        self.known: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)  # which have a digest

    def __len__(self) -> int:
        return len(self.table)

    def insert(self, digests: Uint64s, blocks: Int32s) -> NDArray[np.int64]:
        """Make blocks[i] (distinct) findable under digests[i]; returns the i that are new here.

        Where a digest is known already its first block stays, and blocks[i] is left out; so is a
        block that is found under another.
        """
        index, free = blocks.astype(np.intp), None
        if np.count_nonzero(self.known[index]):
            free = np.flatnonzero(~self.known[index])
            digests, blocks, index = digests[free], blocks[free], index[free]
        new = self.table.put(digests, blocks)
        if len(new) < len(blocks):
            digests, index = digests[new], index[new]
        self.digests[index] = digests
        self.known[index] = True
        return new if free is None else free[new]

    def forget(self, blocks: Index) -> Uint64s:
        """Drop `blocks`, all of them known here; return their digests."""
        if np.count_nonzero(self.known[blocks]) < len(blocks):
            block = int(blocks[~self.known[blocks]][0])
            raise RuntimeError(f"block {block} was evicted but the prefix index has no key")
        digests = self.digests.take(blocks, axis=0)
        self.table.take(digests)
        self.known[blocks] = False
        return digests

    def clear(self) -> int:
        """Drop all; return how many."""
        dropped = len(self.table)
        self.table.clear()
        self.known[:] = False
        return dropped

    def key_of(self, block: int) -> bytes | None:
        """Return the digest under which `block` is found, None if it is not."""
        return self.digests[block].tobytes() if self.known[block] else None

    def problems(self) -> list[str]:
        """Return contradictions between the two directions, in words."""
        blocks = np.flatnonzero(self.known)
        found_as = self.table.find(self.digests[blocks])
        wrong = found_as != blocks
        found = [
            f"prefix index: key of block {block} leads to block {other if other >= 0 else None}"
            for block, other in zip(blocks[wrong].tolist(), found_as[wrong].tolist(), strict=True)
        ]
        if len(blocks) != len(self.table):
            found.append(f"prefix index: {len(self.table)} keys but {len(blocks)} blocks with one")
        return found
