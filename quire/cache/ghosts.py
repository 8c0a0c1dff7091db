"""Ghosts: digests of blocks that were evicted, so that what comes back is known as such.

A block whose digest is here when it is computed anew was wanted twice, like one that was found;
and who asks why nothing was found can be told that it was there once. Knows digests only. Always
holds: at most `limit` digests, the ones evicted last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Ghosts:
    """Empty at first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # In the order of eviction; a plain dict looks for its first key past all that are gone.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes]) -> None:
        """These were just evicted; none of them is here."""
        self._keys.update(dict.fromkeys(keys))
        for _ in range(len(self._keys) - self.limit):
            self._keys.popitem(last=False)

    def take(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of `keys` were here; they are no longer."""
        known = self._keys
        if not known:
            return np.zeros(len(keys), np.bool_)
        absent = _ABSENT
        return np.array([known.pop(key, absent) is None for key in keys], np.bool_)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()


_ABSENT = object()
