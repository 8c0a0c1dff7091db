"""StoreClient: the shared KV store, as the engine's thread sees it.

Follows the outputs of requests, hands ended jobs to the parts that began them (waiting.py,
publishing.py, claims.py), and counts. Knows messages and these parts; no block. Always holds: all
but the threads' calls is called in the engine's thread; whatever fails, missing blocks are
computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire.base.kv_store import KVStoreStats, StoreFailure
from quire.base.report import Report
from quire.cache.store_map import StoreMap
from quire.engine.kv_store.claims import Claims
from quire.engine.kv_store.costs import FetchCosts, StoreSettings
from quire.engine.kv_store.disk_level import DiskLevel
from quire.engine.kv_store.fetches import Fetches
from quire.engine.kv_store.job_threads import JobThreads
from quire.engine.kv_store.jobs import Lookup, StoreFetch
from quire.engine.kv_store.publishing import Publishing
from quire.engine.kv_store.waiting import WaitingRequests
from quire.engine.process.message_routing import id_prefix
from quire.engine.process.messages import FromEngine, Leave, Outputs, Refused, ToEngine
from quire.kv_store.level import SharedLevel
from quire.scheduler.scheduler import Scheduler
from quire.transfer.host import HostStore

# How often an engine with nothing else to do looks after what it publishes.
LOOK_EVERY_S = 0.5


class StoreClient:
    """A BlockSource.

    disk: a level before the shared one. level_ms: what a block of each level takes, the nearest
    first, until it is measured. threads, claims: of others that call the store; None: own ones.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: HostStore,
        tier: StoreMap,
        shared: SharedLevel,
        disk: DiskLevel | None,
        settings: StoreSettings,
        level_ms: Sequence[float],
        now_ms: Callable[[], float],
        report: Report,
        threads: JobThreads | None = None,
        claims: Claims | None = None,
    ) -> None:
        hand_overs = scheduler.hand_overs
        assert hand_overs is not None, "the scheduler has a StoreMap"
        self._shared, self._disk, self._now_ms = shared, disk, now_ms
        if threads is None:
            threads = JobThreads([] if disk is None else [disk], shared, now_ms, report)
        self.threads = threads
        self.costs = FetchCosts(settings, scheduler.speed, level_ms)
        if claims is None:
            claims = Claims(shared, threads.lookers, now_ms)
        self.claims = claims
        self.publishing = Publishing(
            hand_overs=hand_overs,
            tier=tier,
            store=store,
            threads=self.threads,
            on_end=self.claims.end,
        )
        self.fetches = Fetches(tier, store, self.threads, now_ms)
        self.waiting = WaitingRequests(
            hand_overs=hand_overs,
            tier=tier,
            threads=self.threads,
            fetches=self.fetches,
            costs=self.costs,
            publishing=self.publishing,
            claims=self.claims,
            now_ms=now_ms,
        )
        scheduler.add_gate(self.waiting)
        self._reported = KVStoreStats()

    # ---- BlockSource

    @property
    def wake(self) -> Callable[[], None]:
        """Called in a thread of its own when there is something to take in."""
        return self.threads.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self.threads.wake = wake

    @property
    def has_unreported(self) -> bool:
        """See BlockSource."""
        return self.stats() != self._reported

    def take_news(self) -> bool:
        """See BlockSource."""
        self._take_in()
        has_news, self.waiting.has_news = self.waiting.has_news, False
        return has_news

    def clear(self) -> None:
        """See BlockSource: host memory and disk are emptied; the shared store is others' too."""
        self.publishing.forget_all()
        self.waiting.clear()
        if self._disk is not None:
            self.threads.putter.put(self._disk.clear)

    def seen(self, message: FromEngine) -> FromEngine | None:
        """See BlockSource."""
        if isinstance(message, Refused):
            for request_id in message.request_ids:
                self._finished(request_id)
        elif isinstance(message, Outputs):
            message.stats.kv_store = self._reported = self.stats()
            if message.outputs is not None:
                for event in message.outputs.events:
                    if event.finish_reason is not None:
                        self._finished(event.request_id)
                    elif event.token_ids:
                        self.waiting.forget(event.request_id)
        return message

    def shortened(self, wait_s: float | None) -> float | None:
        """See BlockSource: claims are kept alive, and ended."""
        if not len(self.claims) and not len(self.publishing):
            return wait_s
        return LOOK_EVERY_S if wait_s is None else min(wait_s, LOOK_EVERY_S)

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Notice clients that leave; take in what threads have done."""
        for message in messages:
            if isinstance(message, Leave):
                prefix = id_prefix(message.client)
                for request_id in [*self.waiting.request_ids, *self.publishing.request_ids]:
                    if request_id.startswith(prefix):  # no output says that it has ended
                        self._finished(request_id)
        self._take_in()
        return messages

    def stats(self) -> KVStoreStats:
        """Return counters, and the state of the breaker."""
        shared, disk, counts = self._shared, self._disk, self.waiting.counts
        failures = Counter(shared.failures)
        if disk is not None:
            failures.update(disk.failures)
        failures[StoreFailure.SLOW] += counts["slow"]
        return KVStoreStats(
            breaker=shared.breaker.state.value,
            lookups_total=counts["lookups"],
            hit_blocks_total=counts["hits"],
            missed_blocks_total=counts["misses"],
            fetched_blocks_total=shared.traffic.fetched_blocks,
            fetched_bytes_total=shared.traffic.fetched_bytes,
            disk_fetched_blocks_total=0 if disk is None else disk.traffic.fetched_blocks,
            fetch_ms_total=self.waiting.fetch_ms,
            put_blocks_total=shared.traffic.put_blocks,
            put_bytes_total=shared.traffic.put_bytes,
            claims_total=self.claims.num_made,
            waited_total=counts["waited"],
            waited_in_vain_total=counts["waited in vain"],
            failures_total=tuple((one.value, failures[one]) for one in StoreFailure),
        )

    def close(self) -> None:
        """End the threads: what is queued to be put is, for a second; what is fetched is not."""
        self.fetches.cancel_all()
        self.claims.close()
        if self.threads.close():  # else files are still in use
            if self._disk is not None:
                self._disk.close()
            self._shared.store.close()

    # ---- requests and jobs

    def _finished(self, request_id: str) -> None:
        """Note that a request has ended: what it computed is published, and nothing after that."""
        self.waiting.forget(request_id)
        if not self.publishing.finish(request_id):
            self.claims.end(request_id)

    def _take_in(self) -> None:
        """Take in ended jobs, and look at the limits of those that have not ended."""
        for ended in self.threads.ended():
            if isinstance(ended, Lookup):
                self.waiting.looked_up(ended)
            elif isinstance(ended, StoreFetch):
                self.waiting.fetched(ended)
            else:
                self.publishing.note_put(ended)
        self.waiting.look_at_limits()
        self.publishing.end_complete()
        self.claims.note_alive(self._now_ms())
