"""HostStore: a tier in pinned host memory, which the device reads and writes by itself.

The store copies nothing: the device fills and reads the places, the store records the digest of
each. Its content ends with the process. Memory is allocated in pieces with sizes that are powers of
two, because allocators of pinned memory may round up to one. Always holds: all pieces together
take no more than the given bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier

Bytes = NDArray[np.uint8]

PIECE_BYTES = 256 << 20


def piece_sizes(max_bytes: int, block_bytes: int) -> list[int]:
    """Return the sizes of the pieces that hold most blocks within `max_bytes`."""
    most = max(PIECE_BYTES, 1 << (block_bytes - 1).bit_length())
    sizes = [most] * (max_bytes // most)
    left = max_bytes % most
    while left >= block_bytes:
        size = 1 << (left.bit_length() - 1)
        if size < block_bytes:
            break
        sizes.append(size)
        left -= size
    return sizes


class HostStore:
    """A BlockStore (see store.py) in `pieces` of memory."""

    tier = Tier.HOST

    def __init__(self, pieces: Sequence[Bytes], block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._pieces = list(pieces)
        self._firsts = [0, *accumulate(len(piece) // block_bytes for piece in pieces)]
        self.num_blocks = self._firsts[-1]
        self._digests: dict[int, bytes] = {}

    def room(self, place: int) -> Bytes:
        """See BlockStore."""
        piece = bisect_right(self._firsts, place) - 1
        first = (place - self._firsts[piece]) * self.block_bytes
        return self._pieces[piece][first : first + self.block_bytes]

    def held(self) -> Sequence[tuple[bytes, int]]:
        """See BlockStore: nothing outlives a process."""
        return ()

    def save(self, place: int, digest: bytes, raw: Bytes) -> None:
        """See BlockStore; raw is the place's own memory, already filled."""
        self._digests[place] = digest

    def fetch(self, place: int, digest: bytes, out: Bytes) -> bool:
        """See BlockStore; out is the place's own memory."""
        return self._digests.get(place) == digest

    def expect(self, places: Sequence[int]) -> None:
        """See BlockStore: host memory needs no read-ahead."""

    def clear(self) -> None:
        """See BlockStore."""
        self._digests.clear()

    def close(self) -> None:
        """Free the memory."""
        self._pieces.clear()
        self._digests.clear()
