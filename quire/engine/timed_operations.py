"""TimedBlockOperations: block operations that measure how long allocations take.

The cache reads no clock, so the engine that serves passes it this class. Decides nothing.
"""

from __future__ import annotations

import time

from quire._native import BlockOperations
from quire.cache.block_operations import Entries
from quire.cache.table import Index, Int32s


class TimedBlockOperations(BlockOperations):
    """Adds the time of each allocation to `allocation_ns_total`."""

    def take(self, count: int) -> Int32s:
        """See BlockOperations."""
        began_ns = time.perf_counter_ns()
        blocks = super().take(count)
        self.allocation_ns_total += time.perf_counter_ns() - began_ns
        return blocks

    def allocate(self, slots: Index, added: Int32s) -> Entries:
        """See BlockOperations."""
        began_ns = time.perf_counter_ns()
        entries = super().allocate(slots, added)
        self.allocation_ns_total += time.perf_counter_ns() - began_ns
        return entries

    def extend(self, slots: Index, num_tokens: Int32s) -> None:
        """See BlockOperations."""
        began_ns = time.perf_counter_ns()
        super().extend(slots, num_tokens)
        self.allocation_ns_total += time.perf_counter_ns() - began_ns
