"""BlockStore: the interface of a tier's storage, wherever it keeps the bytes of KV blocks.

A tier has `num_blocks` numbered places of one size, each with the digest of its content. Placement
and eviction are decided elsewhere (quire.cache.tier_map): a store keeps no order and evicts
nothing. A remote tier is another class with these methods. Always holds: a block is returned only
for the digest under which it was saved, and only if its bytes are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier

Bytes = NDArray[np.uint8]


class BlockStore(Protocol):
    """Places 0 .. num_blocks - 1 of block_bytes each.

    Methods raise OSError where the medium fails. They are called from one thread; `room` may be
    called from any.
    """

    tier: Tier
    num_blocks: int
    block_bytes: int

    def room(self, place: int) -> Bytes | None:
        """Return the place's own memory; None where places are not in memory.

        The caller fills it and passes it to `save`; `fetch` with it as `out` copies nothing.
        """

    def held(self) -> Sequence[tuple[bytes, int]]:
        """Return (digest, place) of every saved block, oldest first. Called once, at start-up."""

    def save(self, place: int, digest: bytes, raw: Bytes) -> None:
        """Save a block in a place, replacing its content."""

    def fetch(self, place: int, digest: bytes, out: Bytes) -> bool:
        """Read a block into `out`; return False, and drop it, if it is missing or damaged."""

    def expect(self, places: Sequence[int]) -> None:
        """Announce places that will be fetched soon, in this order, so that reads may begin."""

    def clear(self) -> None:
        """Drop all blocks."""

    def close(self) -> None:
        """Release resources; persistent blocks stay."""
