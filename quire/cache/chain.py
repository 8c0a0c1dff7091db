"""Chains: the digests of a request's full blocks, and the hasher that makes them.

Knows tokens, salts and the key; no blocks of the pool. Always holds: two chains have a digest in
common exactly where the same tokens stand before it under the same salt, model and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire._native import hash_chains
from quire.cache.digest import FIXED_KEY, Uint64s, keys_of, seed_of
from quire.cache.owners import Owner
from quire.cache.table import Int32s

NO_DIGESTS: Uint64s = np.empty((0, 2), np.uint64)


@dataclass(slots=True)
class Chain:
    """The digests of a request's full blocks, so that they are computed once while it waits."""

    owner: Owner
    digests: Uint64s  # [num_full_blocks, 2]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The digests as bytes, for tiers and reports; made anew each time."""
        return keys_of(self.digests)

    def end(self, num_blocks: int) -> Uint64s:
        """Return the digest after the first `num_blocks` blocks, [2]."""
        digest: Uint64s = self.digests[num_blocks - 1] if num_blocks else self.owner.seed
        return digest

    def parents(self, first: int, last: int) -> Uint64s:
        """Return the digests before blocks first .. last - 1, [last - first, 2]."""
        return np.concatenate((self.end(first)[None], self.digests[first : last - 1]))


@dataclass(slots=True)
class PrefixMatch:
    """Blocks found for a chain, in order. Valid until the next allocation."""

    chain: Chain
    blocks: Int32s

    @property
    def num_blocks(self) -> int:
        """Full blocks found."""
        return len(self.blocks)

    @property
    def rest(self) -> tuple[bytes, ...]:
        """The digests of the blocks that were not found, as bytes."""
        return keys_of(self.chain.digests[len(self.blocks) :])


class SlotChains:
    """How far the chain of the request in each slot is registered.

    registered: leading blocks that were offered to the prefix index; ends: the digest there; seeds:
    the digest before the first block; owners: numbers (owners.py). returned: requests that were
    preempted: that one needs its own blocks twice is no reuse.
    """

    def __init__(self, num_slots: int) -> None:
        self.registered: Int32s = np.zeros(num_slots, np.int32)
        self.ends: Uint64s = np.zeros((num_slots, 2), np.uint64)
        self.seeds: Uint64s = np.zeros((num_slots, 2), np.uint64)
        self.owners: Int32s = np.zeros(num_slots, np.int32)
        self.returned: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)


class ChainHasher:
    """hash_key, fingerprint: see CacheManager."""

    def __init__(
        self,
        block_size: int,
        *,
        hash_key: bytes = FIXED_KEY,
        fingerprint: str = "",
    ) -> None:
        self._block_size = block_size
        self._key = hash_key
        self._fingerprint = fingerprint

    def seed(self, salt: str) -> Uint64s:
        """Return the digest before the first block."""
        return seed_of(salt, self._key, fingerprint=self._fingerprint)

    def chain(self, token_ids: Int32s, owner: Owner) -> Chain:
        """Return the chain of all full blocks of `token_ids`."""
        digests = hash_chains([token_ids], [owner.seed], self._block_size, self._key)
        return Chain(owner, digests)

    def chains(self, token_ids: Sequence[Int32s], owners: Sequence[Owner]) -> list[Chain]:
        """Return the chains of several requests, digested by one native call."""
        seeds = [owner.seed for owner in owners]
        digests = hash_chains(list(token_ids), seeds, self._block_size, self._key)
        chains, begin = [], 0
        for ids, owner in zip(token_ids, owners, strict=True):
            end = begin + len(ids) // self._block_size
            chains.append(Chain(owner, digests[begin:end]))
            begin = end
        return chains
