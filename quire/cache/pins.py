"""Pins: prefixes that stay findable for a time, whatever else is cached.

A pinned block is free like any other once no request names it, and it is allocated after all
others (pool.py), so a pin never takes room from a request. Each tenant may pin a share of the
pool, and all of them together a larger one; beyond it the blocks that were pinned longest ago lose
their pins, of one prefix the last first. Knows blocks, names of tenants and moments; no requests
and no clock. Always holds: only findable blocks are pinned; after `expire` none beyond its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from quire.cache.age_queue import Index
    from quire.cache.manager import CacheManager
    from quire.cache.table import Int32s

# All tenants together may pin this share of the pool, or what one may if that is more.
SHARE_OF_ALL = 0.5


class Pins:
    """The pins of one cache. share: of its blocks, that one tenant may pin."""

    def __init__(self, cache: CacheManager, share: float) -> None:
        self._cache, self._pool = cache, cache.pool
        num_blocks = cache.num_blocks
        self.max_blocks = int(share * num_blocks)  # of one tenant
        self._max_of_all = int(max(share, SHARE_OF_ALL) * num_blocks)
        self._until_ms: NDArray[np.float64] = np.zeros(num_blocks)  # 0: never pinned
        self._pinned_at: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._tenants: Int32s = np.zeros(num_blocks, np.int32)
        self._numbers: dict[str, int] = {}
        self._num_calls = 0
        self.next_end_ms = math.inf  # no pin ends before
        self.expired_total = self.dropped_total = self.evicted_total = 0

    @property
    def num_blocks(self) -> int:
        """How many blocks are pinned."""
        return int(np.count_nonzero(self._pool.pinned))

    def pin(
        self, blocks: Int32s, tenant: str, spans: Sequence[tuple[int, float]], now_ms: float
    ) -> None:
        """Pin a prefix. spans: (number of its first blocks, until when), longest time first.

        Beyond the share of the tenant the end of the prefix is left out.
        """
        self._expire(now_ms)
        blocks = blocks[: min(self.max_blocks, max(count for count, _ in spans))].astype(np.intp)
        if not len(blocks):
            return
        number = self._numbers.setdefault(tenant, len(self._numbers))
        self._num_calls += 1
        self._pool.pin(blocks.astype(np.int32))
        self._tenants[blocks], self._pinned_at[blocks] = number, self._num_calls
        for count, until_ms in spans:
            span = blocks[:count]
            self._until_ms[span] = np.maximum(self._until_ms[span], until_ms)
            self.next_end_ms = min(self.next_end_ms, until_ms)
        own = self._pool.pinned & (self._tenants == number)
        self._keep(np.flatnonzero(own), self.max_blocks)
        self._keep(np.flatnonzero(self._pool.pinned), self._max_of_all)

    def expire(self, now_ms: float) -> bool:
        """End the pins that are due; return whether any is left."""
        self._expire(now_ms)
        pinned = self._pool.pinned
        left = self._until_ms[pinned]
        self.next_end_ms = float(left.min()) if len(left) else math.inf
        return bool(len(left))

    def _expire(self, now_ms: float) -> None:
        pinned = self._pool.pinned
        evicted = np.flatnonzero((self._until_ms > 0) & ~pinned)  # allocated anew, or flushed
        self._until_ms[evicted] = 0
        self.evicted_total += len(evicted)
        ended = np.flatnonzero(pinned & (self._until_ms <= now_ms))
        self.expired_total += len(ended)
        self._unpin(ended)

    def _keep(self, blocks: Index, most: int) -> None:
        """Unpin the oldest of `blocks` beyond `most`."""
        beyond = len(blocks) - most
        if beyond > 0:
            depths = self._cache.lineage.depths[blocks]
            oldest = np.lexsort((-depths, self._pinned_at[blocks]))[:beyond]
            self.dropped_total += beyond
            self._unpin(blocks[oldest])

    def _unpin(self, blocks: Index) -> None:
        if len(blocks):
            self._pool.unpin(blocks)
            self._until_ms[blocks] = 0
