"""Ghosts: digests of evicted blocks, so that a block computed again is recognized.

Such a block was wanted twice, like one that was found; and a report can say that a missing prefix
was once cached. Always holds: at most `limit` digests, those evicted last. The serving path uses
the native class (native/src/ghosts.cc); here is its plain twin.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.cache.chain import Uint64s, keys_of


class PlainGhosts:
    """Empty at first. limit: at least 1."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: dict[bytes, None] = {}  # in order of eviction

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, digest: Uint64s) -> bool:
        return digest.tobytes() in self._keys

    def add(self, digests: Uint64s) -> None:
        """Remember digests of evicted blocks; forget the oldest beyond the limit."""
        for key in keys_of(digests):
            self._keys.setdefault(key)
            if len(self._keys) > self.limit:
                del self._keys[next(iter(self._keys))]

    def take(self, digests: Uint64s) -> NDArray[np.bool_]:
        """Forget `digests`; return which of them were remembered."""
        found = [key in self._keys and self._keys.pop(key) is None for key in keys_of(digests)]
        return np.array(found, np.bool_)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
