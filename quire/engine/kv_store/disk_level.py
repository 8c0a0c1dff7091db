"""DiskLevel: the disk tier of this engine as a level above the shared store.

The same files as of a disk tier alone (quire/transfer/disk.py), with places and eviction kept here.
Knows no engine. Any thread may call; one at a time is served. Always holds: a disk that fails is
not asked again, which is reported once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from quire.base.kv_store import StoreFailure
from quire.base.report import Report
from quire.cache.tier_map import TierMap
from quire.kv_store.level import Bytes, Fetched, Traffic
from quire.transfer.store import BlockStore


class DiskLevel:
    """A Level in `store`, which it closes."""

    name = "disk"

    def __init__(self, store: BlockStore, report: Report) -> None:
        self.traffic = Traffic()
        self.failures: Counter[StoreFailure] = Counter()
        self._store, self._report = store, report
        self._map = TierMap(store.num_blocks, store.tier)
        self._map.load(store.held())
        self._lock = threading.Lock()
        self._is_broken = False

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._map)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """See Level."""
        with self._lock:
            return [bool(self._map.run((key,))) for key in keys]

    def fetch(self, keys: Sequence[bytes], outs: Sequence[Bytes]) -> list[Fetched]:
        """See Level."""
        with self._lock:
            places = [place for key in keys for place in self._map.run((key,))]
            try:
                self._store.expect(places)
                return [self._fetch(key, out) for key, out in zip(keys, outs, strict=True)]
            except OSError as error:
                self._break(error)
                return [Fetched.MISSING] * len(keys)

    def put(self, keys: Sequence[bytes], raws: Sequence[Bytes]) -> list[bool]:
        """See Level."""
        with self._lock:
            try:
                return [self._put(key, raw) for key, raw in zip(keys, raws, strict=True)]
            except OSError as error:
                self._break(error)
                return [False] * len(keys)

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._map.forget_all()
            try:
                self._store.clear()
            except OSError as error:
                self._break(error)

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._is_broken = True
            self._map.forget_all()
            self._store.close()

    def _fetch(self, key: bytes, out: Bytes) -> Fetched:
        found = self._map.run((key,))
        if not found or self._is_broken:
            return Fetched.MISSING
        if not self._store.fetch(found[0], key, out):
            self._map.forget(found[0])
            self.failures[StoreFailure.CORRUPT] += 1
            return Fetched.BAD
        self._map.begin_fetch(np.array(found, np.int32))
        self._map.end_fetch(found[0])
        self.traffic.fetched_blocks += 1
        self.traffic.fetched_bytes += len(out)
        return Fetched.WHOLE

    def _put(self, key: bytes, raw: Bytes) -> bool:
        if self._is_broken or self._map.knows(key):
            return not self._is_broken
        place = self._map.await_block(key)
        if place is None:
            return False
        self._store.save(place, key, raw)
        self._map.land(place, arrived=True)
        self.traffic.put_blocks += 1
        self.traffic.put_bytes += len(raw)
        return True

    def _break(self, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._map.forget_all()
            self._report("the KV tier failed and is out of use", error=str(error))
