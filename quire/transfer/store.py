"""BlockStore: what a tier must do with the bytes of KV blocks, wherever it keeps them.

A tier is `num_blocks` numbered places of one size, each with the digest of what lies there. Which
place holds what, what is thrown out and when, is decided elsewhere (quire.cache.tier_map): a store
keeps no order and evicts nothing. A remote tier is another class with these verbs. Always holds: a
block is given out only for the digest it was saved under and only if its bytes are those saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier

Bytes = NDArray[np.uint8]


class BlockStore(Protocol):
    """Places 0 .. num_blocks - 1 of block_bytes each. Verbs raise OSError where the medium fails;
    they are called from one thread, `room` from any."""

    tier: Tier
    num_blocks: int
    block_bytes: int

    def room(self, place: int) -> Bytes | None:
        """The place itself, where it is memory: whoever fills it hands it to `save` then, and
        `fetch` with it as out copies nothing. None where places are not memory."""

    def held(self) -> Sequence[tuple[bytes, int]]:
        """(digest, place) of all that lies there, the oldest first. Asked once, at the start."""

    def save(self, place: int, digest: bytes, raw: Bytes) -> None:
        """Put a block there, in the place of whatever it held."""

    def fetch(self, place: int, digest: bytes, out: Bytes) -> bool:
        """Read the block saved there into out; False if it is not there whole, and then it is
        forgotten."""

    def expect(self, places: Sequence[int]) -> None:
        """These will be fetched soon, in this order: whatever can begin now, may."""

    def clear(self) -> None:
        """Forget all that lies there."""

    def close(self) -> None:
        """Let go of it; what was saved stays."""
