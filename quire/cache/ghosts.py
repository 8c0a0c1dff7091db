"""Ghosts: digests of blocks that were evicted, so that what comes back is known as such.

A block whose digest is here when it is computed anew was wanted twice, like one that was found;
and who asks why nothing was found can be told that it was there once. Knows digests only. Always
holds: at most `limit` digests, the ones evicted last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Ghosts:
    """Empty at first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Each key with the number of its eviction, and keys in that order, the first of them number
        # `_first`. One that was taken stays in the order until its turn, or until half of the order
        # is such. (An OrderedDict would drop its oldest by itself, and costs three times as much.)
        self._numbers: dict[bytes, int] = {}
        self._order: deque[bytes] = deque()
        self._first = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def add(self, keys: Sequence[bytes]) -> None:
        """These were just evicted; none of them is here."""
        if len(self._order) > 2 * self.limit:
            self._clear_away()
        numbers, order = self._numbers, self._order
        end = self._first + len(order)
        order.extend(keys)
        numbers.update(zip(keys, range(end, end + len(keys)), strict=True))
        if len(order) == len(numbers):  # none was taken: the order is what is here
            for _ in range(len(numbers) - self.limit):
                del numbers[order.popleft()]
                self._first += 1
        while len(numbers) > self.limit:
            key = order.popleft()
            if numbers.get(key) == self._first:
                del numbers[key]
            self._first += 1

    def take(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which of `keys` were here; they are no longer."""
        known = self._numbers
        if known.keys().isdisjoint(keys):
            return np.zeros(len(keys), np.bool_)
        return np.array([known.pop(key, None) is not None for key in keys], np.bool_)

    def clear(self) -> None:
        """Forget all."""
        self._numbers.clear()
        self._order.clear()

    def _clear_away(self) -> None:
        """Drop from the order what was taken: a dict keeps the order in which keys came."""
        self._order = deque(self._numbers)
        end = self._first + len(self._order)
        self._numbers = dict(zip(self._order, range(self._first, end), strict=True))
