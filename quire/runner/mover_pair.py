"""MoverPair: the mover of a KV tier and that of an exchange between engines, as one.

The places of the exchange come after those of the tier (quire/cache/exchange_beside_tier.py). Knows
no map and no medium. Always holds: every copy ends once, as with one mover; a tier that fails ends
alone, and what it held is computed again, while the exchange goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.base.block_copies import BlockCopies, CopiesEnded, Tier
from quire.base.records import Int32s
from quire.runner.tier_mover import TierMover


class MoverPair:
    """A BlockMover. first: the number of the exchange's first place. on_lost: called in the thread
    of `ended` when the tier has failed."""

    def __init__(
        self,
        tier: TierMover,
        exchange: TierMover,
        *,
        first: int,
        on_lost: Callable[[], None],
    ) -> None:
        self._tier, self._exchange = tier, exchange
        self._first, self._on_lost = first, on_lost

    @property
    def wake(self) -> Callable[[], None]:
        """See BlockMover."""
        return self._exchange.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._tier.wake = self._exchange.wake = wake

    def begin(self, copies: BlockCopies) -> None:
        """See BlockMover; a block that leaves may be the target of a fetch: saves begin first."""
        leaves = copies.from_tiers == Tier.POOL
        places = np.where(leaves, copies.to_blocks, copies.from_blocks)
        is_exchange = places >= self._first
        for is_kind in (leaves, ~leaves):
            for mover, is_own, first in (
                (self._tier, ~is_exchange, 0),
                (self._exchange, is_exchange, self._first),
            ):
                chosen = is_kind & is_own
                if chosen.any():
                    mover.begin(_part(copies, chosen, leaves, first))

    def wait_for(self, blocks: Int32s) -> None:
        """See BlockMover."""
        self._tier.wait_for(blocks)
        self._exchange.wait_for(blocks)

    def ended(self) -> CopiesEnded | None:
        """See BlockMover. Counts and times are those of the tier: it is what they price."""
        own, arrived = self._tier.ended(), self._exchange.ended()
        if own is not None and own.broken:
            self._on_lost()
        if arrived is None and own is None:
            return None
        parts = [one for one in (own, arrived) if one is not None]
        to_blocks = [] if own is None else [own.to_blocks]
        if arrived is not None:
            is_save = arrived.to_tiers != Tier.POOL
            to_blocks.append(np.where(is_save, arrived.to_blocks + self._first, arrived.to_blocks))
        return CopiesEnded(
            to_tiers=np.concatenate([one.to_tiers for one in parts]),
            to_blocks=np.concatenate(to_blocks).astype(np.int32),
            arrived=np.concatenate([one.arrived for one in parts]),
            num_bad=sum(one.num_bad for one in parts),
            fetched=0 if own is None else own.fetched,
            fetch_ms=0.0 if own is None else own.fetch_ms,
            saved=0 if own is None else own.saved,
            save_ms=0.0 if own is None else own.save_ms,
            broken=arrived is not None and arrived.broken,
        )

    def clear(self) -> None:
        """See BlockMover."""
        self._tier.clear()
        self._exchange.clear()

    def close(self) -> None:
        """See BlockMover."""
        self._tier.close()
        self._exchange.close()


def _part(copies: BlockCopies, chosen: np.ndarray, leaves: np.ndarray, first: int) -> BlockCopies:
    """Return the chosen copies, with places counted from `first`."""
    is_save = leaves[chosen]
    from_blocks, to_blocks = copies.from_blocks[chosen], copies.to_blocks[chosen]
    return BlockCopies(
        from_tiers=copies.from_tiers[chosen],
        from_blocks=np.where(is_save, from_blocks, from_blocks - first).astype(np.int32),
        to_tiers=copies.to_tiers[chosen],
        to_blocks=np.where(is_save, to_blocks - first, to_blocks).astype(np.int32),
        digests=copies.digests[chosen],
    )
