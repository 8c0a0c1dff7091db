"""TimedBlockPool: a block pool that measures how long allocations take.

The cache reads no clock, so the engine that serves hands it this pool. Decides nothing.
"""

from __future__ import annotations

import time

from quire.cache.age_queue import Index
from quire.cache.pool import BlockPool, Int32s


class TimedBlockPool(BlockPool):
    """Adds the time of each allocation to `allocation_ns_total`."""

    def allocate(self, count: int) -> tuple[Int32s, Index]:
        """See BlockPool."""
        began_ns = time.perf_counter_ns()
        allocated = super().allocate(count)
        self.allocation_ns_total += time.perf_counter_ns() - began_ns
        return allocated
