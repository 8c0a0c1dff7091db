"""Ghosts: digests of blocks that were evicted, so that what comes back is recognized.

A block with its digest here when it is computed anew was wanted twice, like one that was found; and
a report can say that a missing prefix was there once. Knows digests only. Always holds: at most
`limit` digests, the ones evicted last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire._native import DigestTable
from quire.cache.digest import Uint64s


class Ghosts:
    """Empty at first. limit: at least 1."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Digests in the order of their eviction, in a ring, and where in it each lies. One that
        # was taken stays in the ring until its turn, or until the ring is full.
        self._place_of = DigestTable()
        self._ring: Uint64s = np.zeros((2 * limit, 2), np.uint64)
        self._first = self._end = 0
        # Evicted since the last look-up: a step evicts several times, and looks up once.
        self._fresh: list[Uint64s] = []

    def __len__(self) -> int:
        self._put_fresh()
        return len(self._place_of)

    def __contains__(self, digest: Uint64s) -> bool:
        self._put_fresh()
        return len(self._place_of.longest_run(digest.reshape(1, 2))) == 1

    def add(self, digests: Uint64s) -> None:
        """Add digests of blocks that were just evicted; none of them is here."""
        self._fresh.append(digests)

    def take(self, digests: Uint64s) -> NDArray[np.bool_]:
        """Return which of `digests` were here; they are removed."""
        self._put_fresh()
        taken: NDArray[np.bool_] = self._place_of.take(digests) >= 0
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._fresh = []
        self._place_of.clear()
        self._first = self._end = 0

    def _put_fresh(self) -> None:
        """Enter what was evicted since the last look-up."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        digests = (fresh[0] if len(fresh) == 1 else np.concatenate(fresh))[-self.limit :]
        if self._end - self._first + len(digests) > len(self._ring):
            self._clear_away()
        while len(digests):
            places = self._places(self._end, self._end + len(digests))
            part, digests = digests[: len(places)], digests[len(places) :]
            self._ring[places.start : places.stop] = part
            self._place_of.put(part, np.arange(places.start, places.stop, dtype=np.int32))
            self._end += len(places)
        while (beyond := len(self._place_of) - self.limit) > 0:
            places = self._places(self._first, self._first + beyond)
            self._drop(places)
            self._first += len(places)

    def _places(self, first: int, end: int) -> range:
        """Where in the ring the evictions number first .. end - 1 lie, up to the ring's end."""
        at = first % len(self._ring)
        return range(at, min(at + end - first, len(self._ring)))

    def _drop(self, places: range) -> None:
        """Forget what lies there, but for what was taken (it may be here again, elsewhere)."""
        numbers = np.arange(places.start, places.stop, dtype=np.int32)
        self._place_of.take_pairs(self._ring[places.start : places.stop], numbers)

    def _clear_away(self) -> None:
        """Drop from the ring what was taken."""
        order = np.arange(self._first, self._end) % len(self._ring)
        here = self._ring[order[self._place_of.find(self._ring[order]) == order]]
        self._place_of.clear()
        self._first, self._end = 0, len(here)
        self._ring[: len(here)] = here
        self._place_of.put(here, np.arange(len(here), dtype=np.int32))
