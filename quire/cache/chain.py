"""Chains: the digests of a request's full blocks, their owners, and the hasher that makes them.

The digest of a block is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012, and the
authors' reference code for the wide output) over the digest of the block before it followed by the
block's token ids as little-endian int32. The digest before the first block is that of what makes
the keys and values (the model's fingerprint) and of the cache salt. The key is secret and drawn per
process, so that colliding prompts cannot be crafted; the fixed key is for tests.

Knows tokens, salts and the key; no blocks of the pool. Always holds: two chains have a digest in
common exactly where the same tokens stand before it under the same salt, model and key. Owner
number 0 stands for all owners without a number of their own because there are too many; others keep
theirs while a block is theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire._native import hash_chains, siphash128
from quire.cache.table import Int32s

Uint64s = NDArray[np.uint64]

DIGEST_BYTES = 16
FIXED_KEY = bytes(range(16))
NO_DIGESTS: Uint64s = np.empty((0, 2), np.uint64)
MAX_OWNERS = 1024
OTHER_OWNERS = 0


class HashChains(Protocol):
    """The call that digests many chains at once; quire._native and plain_digest.py have it."""

    def __call__(
        self, token_ids: list[Int32s], seeds: list[Uint64s], block_size: int, key: bytes
    ) -> Uint64s:
        """Return digests of the full blocks of token_ids[i], a chain that starts at seeds[i].

        uint64 [number of blocks of all, 2], one chain after another.
        """


def seed_of(salt: str, key: bytes, *, fingerprint: str = "") -> Uint64s:
    """Return the digest before the first block, uint64 [2].

    Chains of different salts, and those of different models, never meet.
    """
    message = f"{fingerprint}\0{salt}".encode("utf-8", "surrogatepass")
    return np.array(siphash128(message, key), np.uint64)


def keys_of(digests: Uint64s) -> tuple[bytes, ...]:
    """Return the digests [N, 2] as dictionary keys."""
    return struct.unpack(f"{DIGEST_BYTES}s" * len(digests), np.ascontiguousarray(digests).tobytes())


def digests_of(keys: Sequence[bytes]) -> Uint64s:
    """Return the digests that keys_of made keys of."""
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)


class Owner(NamedTuple):
    """One tenant's use of one salt."""

    number: int
    tenant: str
    salt: str
    seed: Uint64s  # [2]


class Owners:
    """A small number for each pair of tenant and salt that has blocks in the cache.

    seed_of: returns the digest before the first block, for a salt.
    """

    def __init__(self, seed_of: Callable[[str], Uint64s], limit: int = MAX_OWNERS) -> None:
        self._seed_of = seed_of
        self._limit = limit
        self._by_name: dict[tuple[str, str], Owner] = {}
        self._free = list(range(limit, OTHER_OWNERS, -1))
        self._since_cleared = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def owner(self, tenant: str, salt: str) -> Owner | None:
        """Return the owner of that name, None for one without a number (yet); see `add`."""
        return self._by_name.get((tenant, salt))

    def add(self, tenant: str, salt: str, used: Callable[[], NDArray[np.int32]]) -> Owner:
        """Add a new owner.

        used: returns the numbers in use; called where all are given out.
        """
        if not self._free and self._since_cleared <= 0:
            self._clear(used())
        number = self._free.pop() if self._free else OTHER_OWNERS
        owner = Owner(number, tenant, salt, self._seed_of(salt))
        if number == OTHER_OWNERS:
            self._since_cleared -= 1
        else:
            self._by_name[tenant, salt] = owner
        return owner

    def number_now(self, owner: Owner) -> int:
        """Return the current number of an owner, which may have lost it."""
        now = self._by_name.get((owner.tenant, owner.salt))
        return OTHER_OWNERS if now is None else now.number

    def of_tenant(self, tenant: str) -> list[Owner]:
        """Return all owners of one tenant, the latest first."""
        return [owner for owner in reversed(self._by_name.values()) if owner.tenant == tenant]

    def by_number(self) -> dict[int, Owner]:
        """Return all owners that have a number."""
        return {owner.number: owner for owner in self._by_name.values()}

    def _clear(self, used: NDArray[np.int32]) -> None:
        """Take back unused numbers; not again until as many owners were added in vain."""
        kept = set(used.tolist())
        gone = [name for name, owner in self._by_name.items() if owner.number not in kept]
        for name in gone:
            self._free.append(self._by_name.pop(name).number)
        self._since_cleared = self._limit


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
    the digest before the first block; owners: their numbers. returned: requests that were
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
