"""TierBesideExchange: the map of a tier, continued by the places of an exchange between engines.

Places up to `first` are the tier's own, those from `first` on the exchange's. A block that another
engine wants is saved to the exchange, every other one to the tier; both are read as one chain.
Knows digests and places, like the two maps. Always holds: what a lease of the exchange waits for
is never taken for saved because the tier has it, nor does it wait for what is on its way there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import Tier
from quire.cache.exchange_map import ExchangeMap
from quire.cache.tier_map import TierMap

Int32s = NDArray[np.int32]


class TierBesideExchange(TierMap):
    """A tier with `num_blocks` places, and `exchange`. Other arguments: see TierMap."""

    exchanges = True

    def __init__(
        self,
        num_blocks: int,
        kind: Tier,
        *,
        exchange: ExchangeMap,
        block_ms: float,
        max_saving: int,
    ) -> None:
        super().__init__(num_blocks, kind, block_ms=block_ms, max_saving=max_saving)
        self.exchange, self.first = exchange, num_blocks

    def knows(self, key: bytes) -> bool:
        """See TierMap; of what an engine wants, only the exchange counts."""
        if self.exchange.wants(key):
            return self.exchange.knows(key)
        return super().knows(key)

    def wants(self, key: bytes) -> bool:
        """See TierMap."""
        return self.exchange.wants(key)

    @property
    def saving_limits(self) -> tuple[int, ...]:
        """See TierMap: of the tier, and of the exchange."""
        return (self.max_saving, self.exchange.max_saving)

    def medium(self, key: bytes) -> int:
        """See TierMap."""
        return int(self.exchange.wants(key))

    def medium_of(self, place: int) -> int:
        """See TierMap."""
        return int(place >= self.first)

    def is_paid(self, places: Int32s) -> bool:
        """See TierMap; what comes before an arrived block is needed with it."""
        return bool((places >= self.first).any())

    def run(self, keys: Sequence[bytes]) -> list[int]:
        """See TierMap; a block in memory is preferred."""
        places = []
        for key in keys:
            if arrived := self.exchange.run((key,)):
                places.append(self.first + arrived[0])
            elif own := super().run((key,)):
                places.append(own[0])
            else:
                break
        return places

    def await_block(self, key: bytes) -> int | None:
        """See TierMap."""
        if not self.exchange.wants(key):
            return super().await_block(key)
        place = self.exchange.await_block(key)
        return None if place is None else self.first + place

    def land(self, place: int, *, arrived: bool) -> None:
        """See TierMap."""
        if place >= self.first:
            self.exchange.land(place - self.first, arrived=arrived)
        else:
            super().land(place, arrived=arrived)

    def begin_fetch(self, places: Int32s) -> None:
        """See TierMap."""
        is_arrived = places >= self.first
        super().begin_fetch(places[~is_arrived])
        self.exchange.begin_fetch(places[is_arrived] - self.first)

    def end_fetch(self, place: int) -> None:
        """See TierMap."""
        if place >= self.first:
            self.exchange.end_fetch(place - self.first)
        else:
            super().end_fetch(place)

    def forget(self, place: int) -> None:
        """See TierMap."""
        if place >= self.first:
            self.exchange.forget(place - self.first)
        else:
            super().forget(place)

    def forget_tier(self) -> None:
        """Leave only the exchange: the tier is out of use."""
        super().forget_all()
        self.num_blocks, self.is_lost = 0, True

    def forget_all(self) -> None:
        """See TierMap."""
        super().forget_all()
        self.exchange.forget_all()

    def problems(self) -> list[str]:
        """See TierMap."""
        return [*super().problems(), *self.exchange.problems()]
