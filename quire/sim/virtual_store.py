"""A KV store shared by simulated engines: its entries in virtual time, and an engine's calls of it.

The use of the store is the engine's own code (quire/engine/kv_store): what is looked up, claimed,
waited for, fetched and put, at which prices. Only what its threads do takes virtual time: a lookup
half the latency; a fetch the other half, and its blocks' time on the engine's link, one after
another; a put its block's time on the way back. A block is one byte here. Always holds: an engine
finds at a time what was put before it, provided that no engine's clock is far ahead (fleet.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from quire.base.errors import SettingError
from quire.base.report import Report
from quire.engine.kv_store.claims import Claims
from quire.engine.kv_store.job_threads import Ended, JobThreads, Workers
from quire.engine.kv_store.jobs import Lookup, StoreFetch
from quire.kv_store.entry import SEAL_BYTES, EntryFormat
from quire.kv_store.level import Bytes, SharedLevel
from quire.kv_store.shared_store import Parts
from quire.sim.events import Call, EngineEvents

FETCH_WHEN = ("cost", "always", "never")
TIMEOUT_MS = 2_000.0  # the default of --kv-store-timeout
# What an entry holds here is not looked at.
ENTRIES = EntryFormat(
    fingerprint=b"simulated", payload_bytes=1, encoding=0, seal=lambda head, rest: bytes(SEAL_BYTES)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """A store in numbers.

    gb_per_s: of one engine's link, in each direction. latency_ms: of a lookup and a fetch together.
    num_bytes: how much it holds. buffer_bytes: host memory of each engine for blocks on their way.
    fetch: as --kv-store-fetch.
    """

    gb_per_s: float
    latency_ms: float
    num_bytes: int
    buffer_bytes: int
    fetch: str = "cost"

    def __post_init__(self) -> None:
        sizes = min(self.num_bytes, self.buffer_bytes)
        if not (self.gb_per_s > 0 and self.latency_ms >= 0 and sizes > 0):
            raise SettingError(
                f"the store has {self.gb_per_s} GB/s, {self.latency_ms} ms, {self.num_bytes} bytes "
                f"and buffers of {self.buffer_bytes}; all but the latency must be above 0"
            )
        if self.fetch not in FETCH_WHEN:
            raise SettingError(f"fetch is {self.fetch!r}; allowed: {', '.join(FETCH_WHEN)}")

    def block_ms(self, block_bytes: int) -> float:
        """Return the time of one block on a link."""
        return block_bytes / (self.gb_per_s * 1e6)


@dataclass(slots=True)
class _Claim:
    record: bytes
    since_ms: float
    until_ms: float = math.inf


class VirtualStore:
    """Entries and claims of all engines. Of the entries the least recently used one gives way."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._since_ms: OrderedDict[bytes, float] = OrderedDict()
        self._claims: dict[bytes, list[_Claim]] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        """Blocks that are stored."""
        return len(self._since_ms)

    def has(self, key: bytes, now_ms: float) -> bool:
        """Return whether a block is stored at a time."""
        return self._since_ms.get(key, math.inf) <= now_ms

    def use(self, key: bytes, now_ms: float) -> bool:
        """Return whether a block is stored at a time, and note that it is of use."""
        if not self.has(key, now_ms):
            return False
        self._since_ms.move_to_end(key)
        return True

    def put(self, key: bytes, now_ms: float) -> None:
        """Store a block from a time on."""
        self._since_ms[key] = min(self._since_ms.get(key, math.inf), now_ms)
        self._since_ms.move_to_end(key)
        while len(self._since_ms) > self._num_blocks:
            self._since_ms.popitem(last=False)
            self.num_evicted += 1

    def claim(self, key: bytes, record: bytes, now_ms: float) -> bool:
        """Make a claim at a time, unless one is alive then."""
        if self.claims(key, now_ms):
            return False
        self._claims.setdefault(key, []).append(_Claim(record, now_ms))
        return True

    def claims(self, key: bytes, now_ms: float) -> list[bytes]:
        """Return the records that are alive under a key at a time."""
        found = self._claims.get(key, ())
        return [one.record for one in found if one.since_ms <= now_ms < one.until_ms]

    def release(self, key: bytes, record: bytes, now_ms: float) -> None:
        """End a claim at a time; before that, it is still seen."""
        for one in self._claims.get(key, ()):
            if one.record == record:
                one.until_ms = min(one.until_ms, now_ms)


class StoreView:
    """The SharedStore of one engine: what is in `store` at this engine's time."""

    def __init__(self, store: VirtualStore, now_ms: Callable[[], float]) -> None:
        self._store, self._now_ms = store, now_ms

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See SharedStore."""
        now_ms = self._now_ms()
        return [self._store.has(key, now_ms) for key in keys]

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        """See SharedStore."""
        sizes: list[int | None] = []
        for key, (head, payload) in zip(keys, rooms, strict=True):
            is_there = self._store.use(key, self._now_ms())
            if is_there:
                head[:] = ENTRIES.head(key, payload)
            sizes.append(len(head) + len(payload) if is_there else None)
        return sizes

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        """See SharedStore."""
        for key in keys:
            self._store.put(key, self._now_ms())
        return [True] * len(keys)

    def remove(self, key: bytes) -> None:
        """See SharedStore: no entry is of no use."""

    def claim(self, key: bytes, record: bytes) -> bool:
        """See SharedStore."""
        return self._store.claim(key, record, self._now_ms())

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        """See SharedStore."""
        now_ms = self._now_ms()
        return [record for key in keys for record in self._store.claims(key, now_ms)]

    def renew(self, key: bytes, record: bytes) -> None:
        """See SharedStore: a claim of a simulated engine lives until it is released."""

    def release(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        self._store.release(key, record, self._now_ms())

    def close(self) -> None:
        """See SharedStore."""


def store_level(store: VirtualStore, events: EngineEvents, report: Report) -> SharedLevel:
    """Return an engine's level in `store`."""
    return SharedLevel(
        StoreView(store, events.now_ms),
        ENTRIES,
        now_ms=events.now_ms,
        timeout_ms=math.inf,
        report=report,
    )


class _NoWorkers(Workers):
    """Workers that make calls at once: of claims, which take no time of their own."""

    def __init__(self, count: int, name: str, report: Report) -> None:
        super().__init__(0, name, report)

    def put(self, call: Call) -> None:
        """See Workers."""
        call()


class VirtualThreads(JobThreads):
    """The JobThreads of one engine, without threads: jobs end at their times."""

    def __init__(
        self,
        shared: SharedLevel,
        events: EngineEvents,
        spec: StoreSpec,
        block_ms: float,
        report: Report,
    ) -> None:
        super().__init__([], shared, events.now_ms, report, _NoWorkers)
        self._events, self._block_ms = events, block_ms
        self._latency_ms = spec.latency_ms / 2
        self._fetched_ms = self._put_ms = 0.0  # when each direction of the link is free

    def look_up(self, lookup: Lookup) -> None:
        """See JobThreads. It is run at once, so that others find its claim in time."""
        ends_ms = self._events.now_ms() + self._latency_ms
        self._events.call_at(ends_ms, partial(self._look_up, lookup))

    def fetch(self, job: StoreFetch, room: Callable[[int], Bytes]) -> None:
        """See JobThreads."""
        now_ms = self._events.now_ms()
        at_ms = max(now_ms + self._latency_ms, self._fetched_ms)
        for first, end in job.slices():
            begins_ms, at_ms = at_ms, at_ms + (end - first) * self._block_ms
            read = partial(job.read, first, end, self._levels, room, begins_ms)
            self._events.at(at_ms, partial(self._end_read, job, first, end, read))
        self._fetched_ms = at_ms

    def put(self, key: bytes, raw: Bytes) -> None:
        """See JobThreads."""
        self._put_ms = max(self._events.now_ms(), self._put_ms) + self._block_ms
        self._events.call_at(self._put_ms, partial(self._put, key, raw))

    def _end_read(self, job: StoreFetch, first: int, end: int, read: Call) -> None:
        read()
        if job.end_slice(first, end, self._events.now_ms()):
            self._end(job)

    def _end(self, ended: Ended) -> None:
        self._events.at(self._events.now_ms(), partial(super()._end, ended))


class VirtualClaims(Claims):
    """Claims that live until they are released."""

    def _keep_renewing(self) -> None:
        pass
