"""StoreMap: an ExchangeMap of the host memory between the pool and stores that are keyed by digest.

Only blocks that a store lacks are saved here, on their way there. Threads that fetch or store
blocks use places beside the engine: while they do, a place is held or awaited, and a flush lets it
go only when they are done. Always holds: no place is given out while a thread uses its memory.
"""

from __future__ import annotations

from quire.cache.exchange_map import ExchangeMap


class StoreMap(ExchangeMap):
    """See ExchangeMap."""

    def __init__(self, num_blocks: int, *, max_saving: int) -> None:
        super().__init__(num_blocks, max_saving=max_saving)
        self._quarantined: set[int] = set()  # in use when all was forgotten

    def knows(self, key: bytes) -> bool:
        """Return whether a block need not be saved: it is here, or no store lacks it."""
        return super().knows(key) or not self.wants(key)

    def land(self, place: int, *, arrived: bool) -> None:
        """See TierMap."""
        is_current = place not in self._quarantined
        self._quarantined.discard(place)
        super().land(place, arrived=arrived and is_current)

    def end_fetch(self, place: int) -> None:
        """See TierMap."""
        super().end_fetch(place)
        if place in self._quarantined and not self._fetching[place]:
            self.land(place, arrived=False)

    def forget_all(self) -> None:
        """Forget all blocks; places in use are freed when their use ends."""
        busy = {*self._awaited, *self._fetching.nonzero()[0].tolist()}
        super().forget_all()
        self._first_unused = max(busy, default=-1) + 1
        below = range(self._first_unused - 1, -1, -1)
        self._free = [place for place in below if place not in busy]
        for place in busy:
            nameless = b"in use %d" % place
            self._awaited[place] = nameless
            self._awaited_keys.add(nameless)
        self._quarantined = busy
