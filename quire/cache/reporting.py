"""ReportingCacheManager: a CacheManager that reports which blocks can be found, and which no more.

For external routers that follow the content of the cache (KV events). Reported hashes are those of
the same tokens on every server: routers compare servers by them, and the digests of the index are
keyed with a secret. Knows no sockets, no clock and no format. Always holds: what was reported as
stored and not as removed since, or cleared, is what the prefix index holds; blocks of isolated
tenants and of salted requests are reported only if that is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire._native import hash_chains
from quire.cache.chain import FIXED_KEY, Uint64s, digests_of, keys_of, seed_of
from quire.cache.manager import CacheManager
from quire.cache.table import Index, Int32s

# Public digests that are remembered of blocks that are gone, for each block of the pool.
GONE_PER_BLOCK = 4


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of blocks of one chain, in order. hashes: of the chain up to each. parent: that of the
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
        # Digests of reported chains by those of the index; of blocks that are gone, the latest.
        self._public: dict[bytes, Uint64s] = {}
        self._gone: OrderedDict[bytes, Uint64s] = OrderedDict()
        super().__init__(*arguments, **options)

    def register(self, slots: Index, computed: Int32s, tokens: Int32s) -> None:
        """See CacheManager."""
        super().register(slots, computed, tokens)
        if self.prefix_caching:
            self._stored(*self._operations.last_inserted())

    def flush(self) -> int:
        """See CacheManager."""
        num_findable = super().flush()
        self._public.clear()
        self._gone.clear()
        self._events.put(CacheCleared())
        return num_findable

    def _save_evicted(self) -> None:
        super()._save_evicted()
        digests, _ = self._operations.last_evicted()
        hashes = []
        for key in keys_of(digests):
            public = self._public.pop(key, None)
            if public is not None:
                hashes.append(int(public[1]))
                self._gone[key] = public
        if hashes:
            self._events.put(BlocksRemoved(tuple(hashes)))
        while len(self._gone) > GONE_PER_BLOCK * self.num_blocks:
            self._gone.popitem(last=False)

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
        keys, parents = keys_of(digests), keys_of(self.lineage.parents[blocks])
        depths = self.lineage.depths[blocks].tolist()
        begin = 0
        for end in range(1, len(keys) + 1):
            if end < len(keys) and parents[end] == keys[end - 1] and depths[end] > 1:
                continue
            self._report_run(keys[begin:end], blocks[begin:end], parents[begin], depths[begin])
            begin = end

    def _report_run(
        self, keys: Sequence[bytes], blocks: Int32s, parent_key: bytes, depth: int
    ) -> None:
        """Report consecutive blocks of one chain; depth: blocks of the chain up to the first."""
        parent = self._parent_of(int(blocks[0]), parent_key, depth)
        tokens = self.lineage.tokens[blocks].ravel()
        public = hash_chains([tokens], [parent], self.block_size, FIXED_KEY)
        for key, digest in zip(keys, public, strict=True):
            self._public[key] = digest
            self._gone.pop(key, None)
        self._events.put(
            BlocksStored(
                hashes=tuple(public[:, 1].tolist()),
                parent=int(parent[1]) if depth > 1 else None,
                token_ids=tuple(tokens.tolist()),
            )
        )

    def _parent_of(self, block: int, parent_key: bytes, depth: int) -> Uint64s:
        """Return the public digest before a block; a private one where it is not known any more."""
        if depth > 1:
            known = self._public.get(parent_key)
            if known is None:
                known = self._gone.get(parent_key)
            return digests_of([parent_key])[0] if known is None else known
        owner = self.owners.by_number().get(int(self.lineage.owners[block]))
        return digests_of([parent_key])[0] if owner is None else seed_of(owner.salt, FIXED_KEY)

    def _is_reported(self, blocks: Int32s) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if self._events.reports_isolated:
            return np.ones(len(blocks), np.bool_)
        owners = self.owners.by_number()
        open_to_all = [number for number, owner in owners.items() if not owner.salt]
        # Owners without a number of their own (0) may be isolated.
        return np.isin(self.lineage.owners[blocks], open_to_all)
