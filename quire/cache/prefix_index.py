"""PrefixIndex: from the digest of a chain of full blocks to the block that holds its last one.

Knows digests (16 bytes each, made by quire.cache.digest) and block numbers; knows neither
tokens nor who uses a block, and evicts nothing by itself: the pool hands out the oldest free
block and the manager makes the index forget it. Always holds: one block a digest, one digest
a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class PrefixIndex:
    """An index over `num_blocks` blocks, empty at first."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: NDArray[Any] = np.full(num_blocks, None, object)  # of bytes | None
        self._has_key: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._block_of)

    def longest_match(self, keys: Sequence[bytes]) -> Int32s:
        """Blocks of the longest run of known keys from the first on."""
        found: list[int] = []
        block_of = self._block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int32)

    def insert(self, keys: Sequence[bytes], blocks: Int32s) -> NDArray[np.intp]:
        """Make blocks[i] findable under keys[i]; returns the i that are new here.

        Where a key is known already its first block stays, and blocks[i] is left out.
        """
        block_of, has_key = self._block_of, self._has_key
        entries = dict(zip(keys, blocks.tolist(), strict=True))
        if (  # nothing of it is known, which is so for nearly all
            len(entries) == len(keys)
            and block_of.keys().isdisjoint(entries)
            and not np.count_nonzero(has_key[blocks])
        ):
            block_of.update(entries)
            self._key_of[blocks] = np.array(keys, object)
            has_key[blocks] = True
            return np.arange(len(keys))
        new: list[int] = []
        for at, (key, block) in enumerate(zip(keys, blocks.tolist(), strict=True)):
            if key in block_of or has_key[block]:
                continue
            block_of[key] = block
            self._key_of[block] = key
            has_key[block] = True
            new.append(at)
        return np.array(new, np.intp)

    def forget(self, blocks: Int32s) -> list[bytes]:
        """Drop `blocks`, all of them known here; returns their keys."""
        known = self._has_key[blocks]
        if np.count_nonzero(known) < len(blocks):
            block = int(blocks[~known][0])
            raise RuntimeError(f"block {block} was evicted but the prefix index has no key")
        keys: list[bytes] = self._key_of[blocks].tolist()
        block_of = self._block_of
        for key in keys:
            del block_of[key]
        self._key_of[blocks] = None
        self._has_key[blocks] = False
        return keys

    def clear(self) -> int:
        """Drop all; returns how many."""
        dropped = len(self._block_of)
        self._block_of.clear()
        self._key_of[:] = None
        self._has_key[:] = False
        return dropped

    def key_of(self, block: int) -> bytes | None:
        """The digest under which `block` is found, None if it is not."""
        key: bytes | None = self._key_of[block]
        return key

    def problems(self) -> list[str]:
        """Contradictions between the two directions, in words; empty when the books agree."""
        found = [
            f"prefix index: key of block {block} leads to block {self._block_of.get(key)}"
            for block, key in enumerate(self._key_of)
            if key is not None and self._block_of.get(key) != block
        ]
        if [key is not None for key in self._key_of] != self._has_key.tolist():
            found.append("prefix index: blocks are marked that have no key, or not that have one")
        known = sum(key is not None for key in self._key_of)
        if known != len(self._block_of):
            found.append(f"prefix index: {len(self._block_of)} keys but {known} blocks with one")
        return found
