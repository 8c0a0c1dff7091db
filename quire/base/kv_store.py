"""What an engine reports of the shared KV store: counters, and the state of its breaker.

Numbers and names only. Always holds: counters (`_total`) only grow while the engine lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether the store is asked. HALF_OPEN: one call tries whether it works again."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class StoreFailure(StrEnum):
    """Why the store did not do what it was asked for; labels of a metric."""

    ERROR = "error"  # a call failed
    SLOW = "slow"  # a call or a lookup took longer than --kv-store-timeout, or than computing
    FULL = "full"  # there was no room for a block
    CORRUPT = "corrupt"  # a block had other bytes than were stored, or another block's


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreStats:
    """Counters and the breaker's state. Blocks of the disk level are counted apart.

    lookups: requests for which the store was asked. hit, missed: blocks of these that it had, and
    had not. waited: requests that waited for what another engine was computing. failures: how
    often, by StoreFailure.
    """

    breaker: str = BreakerState.CLOSED.value
    lookups_total: int = 0
    hit_blocks_total: int = 0
    missed_blocks_total: int = 0
    fetched_blocks_total: int = 0
    fetched_bytes_total: int = 0
    disk_fetched_blocks_total: int = 0
    fetch_ms_total: float = 0.0
    put_blocks_total: int = 0
    put_bytes_total: int = 0
    claims_total: int = 0
    waited_total: int = 0
    waited_in_vain_total: int = 0
    failures_total: tuple[tuple[str, int], ...] = ()
