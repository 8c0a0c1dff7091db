"""ExchangeMap: a TierMap of blocks that are handed over between engines, in either direction.

Blocks come from the pool, for another engine, or from another engine, for the pool. Nothing else
is saved here: what the pool evicts and what preempted requests hold is recomputed. Always holds: a
block that is wanted is saved even while the pool evicts it; each of `listeners` is called for each
block that can be found from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier
from quire.cache.tier_map import TierMap

Int32s = NDArray[np.int32]


class ExchangeMap(TierMap):
    """`num_blocks` places in memory of the host. listeners: called with a digest and its place."""

    keeps_evicted = False
    exchanges = True

    def __init__(self, num_blocks: int, *, max_saving: int) -> None:
        super().__init__(num_blocks, Tier.HOST, block_ms=0.0, max_saving=max_saving)
        self._wanted: Counter[bytes] = Counter()
        self.listeners: list[Callable[[bytes, int], None]] = []

    @property
    def num_kept(self) -> int:
        """Places that stay as they are: held, or being fetched."""
        return int(np.count_nonzero(self._fetching))

    def is_awaited(self, key: bytes) -> bool:
        """Return whether a block is on its way here."""
        return key in self._awaited_keys

    def want(self, keys: Iterable[bytes]) -> None:
        """Save these blocks when the pool has them."""
        self._wanted.update(keys)

    def want_no_more(self, keys: Iterable[bytes]) -> None:
        """Undo one `want` of each key."""
        for key in keys:
            self._wanted[key] -= 1
            if self._wanted[key] <= 0:
                del self._wanted[key]

    def wants(self, key: bytes) -> bool:
        """See TierMap."""
        return key in self._wanted

    def is_paid(self, places: Int32s) -> bool:
        """See TierMap."""
        return True

    def land(self, place: int, *, arrived: bool) -> None:
        """See TierMap."""
        key = self._awaited.get(place)
        super().land(place, arrived=arrived)
        if key is not None and arrived:
            found = self._place_of.get(key)
            if found is not None:
                for listener in self.listeners:
                    listener(key, found)

    def hold(self, places: Iterable[int]) -> None:
        """Keep these places as they are until `end_fetch` of each."""
        for place in places:
            self._fetching[place] += 1
