"""ReportingCacheManager: a CacheManager that reports which blocks can be found, and which no more.

For external routers that follow the content of the cache (KV events). Knows no sockets, no clock
and no format. Always holds: what was reported as stored and not as removed since, or cleared, is
what the prefix index holds; blocks of isolated tenants and of salted requests are reported only if
that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.cache.chain import Uint64s, digests_of
from quire.cache.manager import CacheManager
from quire.cache.table import Index, Int32s


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks of one chain, in order. hashes: 64 bits of their digests. parent: of the
    block before the first; None at the beginning. token_ids: of all blocks, joined."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that are no longer found."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No block is found any more."""


BlockEvent = BlocksStored | BlocksRemoved | CacheCleared


class BlockEvents(Protocol):
    """Receives events in the cache's thread; must not block."""

    @property
    def reports_isolated(self) -> bool:
        """Whether blocks of isolated tenants and of salted requests are reported."""

    def put(self, event: BlockEvent) -> None: ...


class ReportingCacheManager(CacheManager):
    """As CacheManager. events: where it reports."""

    def __init__(self, *arguments: Any, events: BlockEvents, **options: Any) -> None:
        self._events = events
        self._reported: set[int] = set()
        super().__init__(*arguments, **options)

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> None:
        """See CacheManager."""
        super().register(slots, computed, tokens)
        if self.prefix_caching:
            self._stored(*self._operations.last_inserted())

    def flush(self) -> int:
        """See CacheManager."""
        num_findable = super().flush()
        self._reported.clear()
        self._events.put(CacheCleared())
        return num_findable

    def _save_evicted(self) -> None:
        super()._save_evicted()
        digests, _ = self._operations.last_evicted()
        hashes = tuple(hash_ for hash_ in hashes_of(digests) if hash_ in self._reported)
        if hashes:
            self._reported.difference_update(hashes)
            self._events.put(BlocksRemoved(hashes))

    def _insert_fetched(self, keys: list[bytes], blocks: Int32s) -> None:
        super()._insert_fetched(keys, blocks)
        new = self.index.known[blocks]  # they were allocated for this, and had no digest
        self._stored(digests_of(keys)[new], blocks[new])

    def _stored(self, digests: Uint64s, blocks: Int32s) -> None:
        """Report blocks that became findable, a run for each chain."""
        if not len(blocks):
            return
        reported = self._is_reported(blocks)
        if not reported.all():
            digests, blocks = digests[reported], blocks[reported]
        hashes, parents = hashes_of(digests), hashes_of(self.lineage.parents[blocks])
        depths = self.lineage.depths[blocks].tolist()
        tokens = self.lineage.tokens[blocks]
        begin = 0
        for end in range(1, len(hashes) + 1):
            if end < len(hashes) and parents[end] == hashes[end - 1] and depths[end] > 1:
                continue
            self._events.put(
                BlocksStored(
                    hashes=tuple(hashes[begin:end]),
                    parent=parents[begin] if depths[begin] > 1 else None,
                    token_ids=tuple(tokens[begin:end].ravel().tolist()),
                )
            )
            begin = end
        self._reported.update(hashes)

    def _is_reported(self, blocks: Int32s) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if self._events.reports_isolated:
            return np.ones(len(blocks), np.bool_)
        owners = self.owners.by_number()
        open_to_all = [number for number, owner in owners.items() if not owner.salt]
        # Owners without a number of their own (0) may be isolated.
        return np.isin(self.lineage.owners[blocks], open_to_all)


def hashes_of(digests: Uint64s) -> Sequence[int]:
    """Return the last 8 bytes of each digest, as numbers."""
    hashes: list[int] = digests[:, 1].tolist()
    return hashes
