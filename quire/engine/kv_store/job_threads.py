"""JobThreads: the threads that call stores, so that the engine's thread never waits for one.

Lookups, fetches and puts have threads of their own. What has ended is kept until the engine's
thread takes it. Knows levels and jobs; no request and no map. Always holds: a thread that hangs in
a store holds up only what waits for it there; jobs end even where a call fails.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quire.base.report import Report
from quire.engine.kv_store.jobs import Lookup, PutEnded, StoreFetch
from quire.kv_store.level import Bytes, Level, SharedLevel

FETCH_THREADS = 3
_LOOKUP_THREADS = 2
_CLOSE_S = 1.0

Ended = Lookup | StoreFetch | PutEnded


class Workers:
    """Daemon threads that make calls, in the order in which they came."""

    def __init__(self, count: int, name: str, report: Report) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._report = report
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call."""
        self._calls.put(call)

    def close(self) -> bool:
        """Let queued calls finish; return False where a thread is not done in a second, and is left
        behind."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  of one job; the others go on
                self._report(
                    "a job of the KV store failed", error=f"{type(error).__name__}: {error}"
                )


class JobThreads:
    """Threads of one engine. nearer: levels before the shared one. now_ms: a clock.

    wake: called in a thread when there is something to take. workers(count, name, report): makes
    the threads.
    """

    def __init__(
        self,
        nearer: Sequence[Level],
        shared: SharedLevel,
        now_ms: Callable[[], float],
        report: Report,
        workers: Callable[[int, str, Report], Workers] = Workers,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._nearer, self._shared, self._now_ms = nearer, shared, now_ms
        self._levels: list[Level] = [*nearer, shared]
        self.lookers = workers(_LOOKUP_THREADS, "quire-kv-lookup", report)
        self._fetchers = workers(FETCH_THREADS, "quire-kv-fetch", report)
        self.putter = workers(1, "quire-kv-put", report)
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    @property
    def last_level(self) -> int:
        """The number of the shared level."""
        return len(self._levels) - 1

    def can_ask(self, *, hangs: bool) -> bool:
        """Return whether a lookup is of use. hangs: one does not return."""
        return self._shared.breaker.may_allow or (bool(self._nearer) and not hangs)

    def can_put(self) -> bool:
        """Return whether a level takes blocks."""
        return bool(self._nearer) or self._shared.breaker.may_allow

    def note_hung(self) -> None:
        """Take the shared store out of use, because a call has not returned in time."""
        self._shared.stalled()

    def look_up(self, lookup: Lookup) -> None:
        """Run a lookup."""
        self.lookers.put(partial(self._look_up, lookup))

    def fetch(self, job: StoreFetch, room: Callable[[int], Bytes]) -> None:
        """Read the blocks of a job. room: returns the memory of a place."""
        for first, end in job.slices():
            self._fetchers.put(partial(self._read, job, first, end, room))

    def put(self, key: bytes, raw: Bytes) -> None:
        """Put a block into each level; its bytes stay as they are until that has ended."""
        self.putter.put(partial(self._put, key, raw))

    def ended(self) -> Iterator[Ended]:
        """Take what has ended, each once."""
        while not self._ended.empty():
            yield self._ended.get()

    def close(self) -> bool:
        """End the threads; return False where one hangs."""
        ended = [one.close() for one in (self.lookers, self._fetchers, self.putter)]
        return all(ended)

    def _look_up(self, lookup: Lookup) -> None:
        try:
            lookup.run(self._levels, self._shared)
        finally:
            lookup.ended_ms = self._now_ms()
            self._end(lookup)

    def _read(self, job: StoreFetch, first: int, end: int, room: Callable[[int], Bytes]) -> None:
        try:
            job.read(first, end, self._levels, room, self._now_ms())
        finally:
            if job.end_slice(first, end, self._now_ms()):
                self._end(job)

    def _put(self, key: bytes, raw: Bytes) -> None:
        is_stored = False
        try:
            for level in self._nearer:
                level.put([key], [raw])
            (is_stored,) = self._shared.put([key], [raw])
        finally:
            self._end(PutEnded(key, is_stored))

    def _end(self, ended: Ended) -> None:
        self._ended.put(ended)
        self.wake()
