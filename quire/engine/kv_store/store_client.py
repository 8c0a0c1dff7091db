"""StoreClient: the shared KV store, as the engine's thread sees it.

When a request is about to be admitted, the blocks that the pool lacks are looked up in the levels
below (disk, shared store) by a thread, while the request waits at a gate. What is there is fetched
into host memory if that is predicted to be faster than computing it, and then loaded into the pool
as from any tier. What no store has is computed; its blocks are saved to host memory as they are
computed, and put from there by a thread. If another engine has claimed them, the request may wait
for them instead, no longer than computing takes (so that waiting costs at most as much again).
Knows the scheduler, the map of places, and jobs; files and sockets are the levels'. Always holds:
all maps are used in the engine's thread only; every wait of a request has a limit; whatever fails,
missing blocks are computed.
"""

from __future__ import annotations

import queue
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.base.block_copies import CopiesEnded
from quire.base.kv_store import KVStoreStats, StoreFailure
from quire.base.records import Int32s, Request
from quire.base.report import Report
from quire.base.timeline import WaitReason
from quire.cache.store_map import StoreMap
from quire.engine.core import Inbox
from quire.engine.kv_store.disk_level import DiskLevel
from quire.engine.kv_store.jobs import ENGINE_ID_BYTES, FetchJob, Lookup, Workers
from quire.engine.outside_blocks import NOTHING_MOVED, SourceInbox, can_use_outside_blocks
from quire.engine.process.message_routing import id_prefix
from quire.engine.process.messages import FromEngine, Leave, Outputs, Refused, ToEngine
from quire.kv_store.level import Fetched, Level, SharedLevel
from quire.runner.tier_mover import TierMover
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.transfer.host import HostStore

FETCH_THREADS = 3
# A prompt of less than this is not looked up, and not claimed, unless fetching is forced.
MIN_ASK_MS, MIN_CLAIM_MS = 1.0, 50.0
# How often it is looked whether what another engine computes has arrived.
POLL_MS = 50.0
# A claim is renewed so often; it ends after CLAIM_LEASE_S without.
RENEW_MS = 3_000.0
# How often an engine with nothing else to do looks after its claims.
LOOK_EVERY_S = 0.5
# Digests of blocks that are known to be stored, so that they are not put again.
MAX_STORED = 1 << 16
_KEEP = 0.9  # what a fetched block leaves of the estimate before it
_FADE = 0.98  # a way found too slow is tried again in the end
_Ended = Lookup | FetchJob | tuple[bytes, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How an engine uses the store. fetch: "cost", "always" or "never".

    timeout_ms: a request waits at most so long for a lookup, or for the next block.
    """

    block_size: int
    block_bytes: int
    fetch: str
    timeout_ms: float


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that has not begun. first: the block that keys begin with.

    lookup: under way. jobs: that it waits for. held: places kept for it. until_ms: when it stops
    waiting for what it waits for now. poll_ms: when to look again for what another engine computes.
    """

    request: Request
    keys: tuple[bytes, ...]
    before: tuple[bytes, ...]
    compute_ms: float
    until_ms: float
    lookup: Lookup | None = None
    levels: Sequence[int] = ()
    target: int = 0  # leading keys that will be stored when another engine has computed them
    num_seen: int = 0  # of these, stored when the limit was set
    poll_ms: float = 0.0
    jobs: set[FetchJob] = field(default_factory=set)
    held: list[int] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Published:
    """A prompt with blocks that go to the store. pending: not saved yet; putting: on their way."""

    keys: tuple[bytes, ...]
    pending: set[bytes]
    putting: set[bytes] = field(default_factory=set)
    has_ended: bool = False


class StoreClient:
    """A TierEnd, a Gate, and what watches an engine's messages.

    levels: from the nearest on; the last is the shared one.
    """

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        mover: TierMover,
        store: HostStore,
        tier: StoreMap,
        shared: SharedLevel,
        disk: DiskLevel | None,
        terms: Terms,
        level_ms: Sequence[float],
        now_ms: Callable[[], float],
        report: Report,
    ) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has a StoreMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs
        self._mover, self._store, self._tier = mover, store, tier
        self._shared, self._disk, self._terms = shared, disk, terms
        self._levels: list[Level] = [shared] if disk is None else [disk, shared]
        self._block_ms = list(level_ms)
        self._lookup_ms = MIN_ASK_MS
        self._now_ms, self._report = now_ms, report
        self._engine_id = secrets.token_bytes(ENGINE_ID_BYTES)
        self._lookers = Workers(2, "quire-kv-lookup", report)
        self._fetchers = Workers(FETCH_THREADS, "quire-kv-fetch", report)
        self._putter = Workers(1, "quire-kv-put", report)
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._asked: dict[str, _Asked] = {}
        self._lookups: dict[Lookup, bool] = {}  # under way: whether its thread hangs
        self._jobs: set[FetchJob] = set()  # those under way, likewise
        self._job_of: dict[bytes, FetchJob] = {}  # by the digest of a block on its way
        self._published: dict[str, _Published] = {}
        self._claims: dict[str, tuple[bytes, bytes]] = {}  # key and record, by request
        self._renewed_ms = 0.0
        self._putting: dict[bytes, int] = {}  # places
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._has_news = False
        self._emit: Callable[[FromEngine], None] = lambda message: None
        self._reported = KVStoreStats()
        self._slow = 0
        self._counts: Counter[str] = Counter()
        self._fetch_ms = 0.0
        tier.on_landed = self._landed
        scheduler.add_gate(self)

    # ---- TierEnd: what the core asks once a step

    @property
    def wake(self) -> Callable[[], None]:
        """Called in a thread of its own when there is something to take in."""
        return self._wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._wake = self._mover.wake = wake

    def ended(self) -> CopiesEnded | None:
        """See TierEnd; blocks that arrived from stores are in the map already."""
        self._take_in()
        copies = self._mover.ended()
        if copies is None and self._has_news:
            copies = NOTHING_MOVED
        self._has_news = False
        return copies

    def clear(self) -> None:
        """See TierEnd: host memory and disk are emptied; the shared store is others' too."""
        self._mover.clear()
        for job in self._jobs:
            job.is_cancelled = True
        self._job_of.clear()
        self._stored.clear()
        for asked in self._asked.values():
            self._open(asked)
        if self._disk is not None:
            self._putter.put(self._disk.clear)

    # ---- Gate

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether blocks of `sequence` are being looked up or fetched."""
        request = sequence.request
        asked = self._asked.get(request.request_id)
        if asked is None:
            if sequence.leader is not None or not can_use_outside_blocks(request):
                return False
            asked = self._begin(request, sequence.token_ids)
            self._asked[request.request_id] = asked
        return not asked.is_over

    # ---- messages of the engine

    def watched(self, inbox: Inbox) -> Inbox:
        """Return an inbox that lets this take in what threads have done."""
        return SourceInbox(self, inbox)

    def watch(self, emit: Callable[[FromEngine], None]) -> Callable[[FromEngine], None]:
        """Return an `emit` that notices what became of requests."""

        def watched(message: FromEngine) -> None:
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
                            self._forget(event.request_id)
            emit(message)

        self._emit = watched
        return watched

    def shortened(self, wait_s: float | None) -> float | None:
        """Return how long an idle engine may wait: claims are kept alive, and ended."""
        if not self._claims and not self._published:
            return wait_s
        return LOOK_EVERY_S if wait_s is None else min(wait_s, LOOK_EVERY_S)

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Notice clients that leave; take in what threads have done."""
        for message in messages:
            if isinstance(message, Leave):
                prefix = id_prefix(message.client)
                for request_id in [*self._asked, *self._published]:
                    if request_id.startswith(prefix):  # no output says that it has ended
                        self._finished(request_id)
        self._take_in()
        if not messages and not self._scheduler.has_work and self.stats() != self._reported:
            self._emit(Outputs(outputs=None, stats=self._scheduler.stats()))
        return messages

    def stats(self) -> KVStoreStats:
        """Return counters, and the state of the breaker."""
        shared, disk, counts = self._shared, self._disk, self._counts
        failures = Counter(shared.failures)
        if disk is not None:
            failures.update(disk.failures)
        failures[StoreFailure.SLOW] += self._slow
        return KVStoreStats(
            breaker=shared.breaker.state.value,
            lookups_total=counts["lookups"],
            hit_blocks_total=counts["hits"],
            missed_blocks_total=counts["misses"],
            fetched_blocks_total=shared.traffic.fetched_blocks,
            fetched_bytes_total=shared.traffic.fetched_bytes,
            disk_fetched_blocks_total=0 if disk is None else disk.traffic.fetched_blocks,
            fetch_ms_total=self._fetch_ms,
            put_blocks_total=shared.traffic.put_blocks,
            put_bytes_total=shared.traffic.put_bytes,
            claims_total=counts["claims"],
            waited_total=counts["waited"],
            waited_in_vain_total=counts["waited in vain"],
            failures_total=tuple((one.value, failures[one]) for one in StoreFailure),
        )

    def close(self) -> None:
        """End the threads: what is being put is finished, what is fetched is not."""
        for job in self._jobs:
            job.is_cancelled = True
        for key, record in self._claims.values():
            self._release_claim(key, record)
        ended = [one.close() for one in (self._lookers, self._fetchers, self._putter)]
        if all(ended):  # else files are still in use
            if self._disk is not None:
                self._disk.close()
            self._shared.store.close()

    # ---- requests

    def _begin(self, request: Request, token_ids: Int32s) -> _Asked:
        """Look up what the pool lacks of a request, if that is worth it."""
        now_ms = self._now_ms()
        chain = self._hand_overs.chain(request, token_ids)
        keys = self._hand_overs.lacking(chain)
        size, first = self._terms.block_size, len(chain.digests) - len(keys)
        # A preempted request knows more tokens; blocks of answers are in no store.
        keys = keys[: max(len(request.prompt_ids) // size - first, 0)]
        total = first + len(keys)
        compute_ms = self._scheduler.speed.span_ms(first * size, total * size) if keys else 0.0
        asked = _Asked(
            request=request,
            keys=keys,
            before=chain.keys[:first],
            compute_ms=compute_ms,
            until_ms=now_ms + self._limit_ms(compute_ms),
        )
        pays = self._terms.fetch == "always" or (
            self._terms.fetch == "cost" and compute_ms > self._lookup_ms
        )
        can_ask = self._shared.breaker.may_allow or (
            self._disk is not None and not any(self._lookups.values())
        )
        if not keys or not pays or not can_ask:
            asked.is_over = True
            self._publish(asked, 0)
            return asked
        self._look_up(asked)
        return asked

    def _limit_ms(self, compute_ms: float) -> float:
        """Return how long a request may wait for something that spares it so much computing."""
        if self._terms.fetch == "always":
            return self._terms.timeout_ms
        return min(max(compute_ms, MIN_ASK_MS), self._terms.timeout_ms)

    def _look_up(self, asked: _Asked) -> None:
        forced = self._terms.fetch == "always"
        lookup = Lookup(
            request_id=asked.request.request_id,
            keys=asked.keys,
            before=asked.before,
            owner=self._engine_id + secrets.token_bytes(ENGINE_ID_BYTES),
            may_claim=forced or asked.compute_ms >= MIN_CLAIM_MS,
            began_ms=self._now_ms(),
        )
        asked.lookup = lookup
        self._lookups[lookup] = False
        self._lookers.put(partial(self._run_lookup, lookup))

    def _run_lookup(self, lookup: Lookup) -> None:
        """Run a lookup; in a thread."""
        try:
            lookup.run(self._levels, self._shared)
        finally:
            lookup.ended_ms = self._now_ms()
            self._ended.put(lookup)
            self._wake()

    def _looked_up(self, lookup: Lookup) -> None:
        """Take in how far a chain is stored, and decide."""
        request_id = lookup.request_id
        del self._lookups[lookup]
        for key in lookup.keys[len(lookup.levels) :]:
            self._stored.pop(key, None)
        asked = self._asked.get(request_id)
        if lookup.claimed is not None:
            if asked is None or request_id in self._claims:
                self._release_claim(lookup.claimed, lookup.record)
            else:
                self._claims[request_id] = lookup.claimed, lookup.record
                self._counts["claims"] += 1
        if asked is None or asked.lookup is not lookup:
            return  # it did not wait for it
        asked.lookup, asked.levels = None, lookup.levels
        took_ms = lookup.ended_ms - lookup.began_ms
        self._lookup_ms = _KEEP * self._lookup_ms + (1.0 - _KEEP) * took_ms
        is_first = not asked.target
        if is_first:
            self._counts["lookups"] += 1
        if lookup.num_elsewhere and self._waiting_pays(asked, lookup):
            if is_first:
                self._counts["waited"] += 1
                asked.target = len(lookup.levels) + lookup.num_elsewhere
                self._limit_wait(asked)
            asked.poll_ms = self._now_ms() + POLL_MS
            return
        self._fetch(asked)

    def _waiting_pays(self, asked: _Asked, lookup: Lookup) -> bool:
        if self._terms.fetch == "always":
            return True
        num_blocks = len(lookup.levels) + lookup.num_elsewhere
        levels = [*lookup.levels, *[len(self._levels) - 1] * lookup.num_elsewhere]
        return self._lookup_ms + POLL_MS + self._move_ms(levels) < self._compute_ms(
            asked, num_blocks
        )

    def _limit_wait(self, asked: _Asked) -> None:
        """Set how long to wait for another engine: as long as computing would take."""
        asked.num_seen = len(asked.levels)
        limit_ms = self._compute_ms(asked, asked.target) - self._compute_ms(asked, asked.num_seen)
        if self._terms.fetch == "always":
            limit_ms = self._terms.timeout_ms
        asked.until_ms = self._now_ms() + limit_ms

    def _compute_ms(self, asked: _Asked, num_blocks: int) -> float:
        size, first = self._terms.block_size, len(asked.before)
        return self._scheduler.speed.span_ms(first * size, (first + num_blocks) * size)

    def _move_ms(self, levels: Sequence[int]) -> float:
        return sum(self._block_ms[level] for level in levels)

    def _fetch(self, asked: _Asked) -> None:
        """Fetch what is stored, if that is cheaper; publish what is not."""
        levels = asked.levels
        self._counts["hits"] += len(levels)
        self._counts["misses"] += len(asked.keys) - len(levels)
        self._publish(asked, len(levels))
        compute_ms = self._compute_ms(asked, len(levels))
        if levels and self._terms.fetch == "cost" and self._move_ms(levels) >= compute_ms:
            for level in set(levels):
                self._block_ms[level] *= _FADE
            levels = ()
        asked.until_ms = self._now_ms() + max(
            self._limit_ms(compute_ms), min(2 * self._move_ms(levels), self._terms.timeout_ms)
        )
        keys, places, own_levels = [], [], []
        for key, level in zip(asked.keys, levels, strict=False):
            if (job := self._job_of.get(key)) is not None:
                asked.jobs.add(job)  # for another request that begins alike
                continue
            if self._tier.run((key,)):
                continue  # it has come meanwhile
            place = None if self._tier.is_awaited(key) else self._tier.await_block(key)
            if place is None:
                self._counts["no room"] += 1
                break
            keys.append(key)
            places.append(place)
            own_levels.append(level)
        if keys:
            job = FetchJob(keys, places, own_levels, self._now_ms())
            self._jobs.add(job)
            self._job_of |= dict.fromkeys(keys, job)
            asked.jobs.add(job)
            for first, end in job.slices():
                self._fetchers.put(partial(self._read, job, first, end))
        if not asked.jobs:
            self._open(asked)

    def _read(self, job: FetchJob, first: int, end: int) -> None:
        """Read a slice; in a thread."""
        try:
            job.read(first, end, self._levels, self._store.room)
        finally:
            if job.note_read(end - first, self._now_ms()):
                self._ended.put(job)
                self._wake()

    def _open(self, asked: _Asked) -> None:
        """Let a request begin."""
        if asked.lookup is not None:
            asked.lookup.is_abandoned = True
            asked.lookup = None
        if not asked.is_over:
            asked.is_over = self._has_news = True

    def _forget(self, request_id: str) -> None:
        """Note that a request runs or has ended, and waits for nothing here."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        self._open(asked)
        for place in asked.held:
            self._tier.end_fetch(place)
        for job in asked.jobs & self._jobs:
            if not any(job in other.jobs for other in self._asked.values()):
                job.is_cancelled = True

    def _finished(self, request_id: str) -> None:
        """Note that a request has ended: what it computed is published, and nothing after that."""
        self._forget(request_id)
        published = self._published.get(request_id)
        if published is not None and not published.has_ended:
            published.has_ended = True
            self._hand_overs.end(request_id)
        elif published is None:
            self._end_claim(request_id)

    # ---- what threads have done

    def _take_in(self) -> None:
        """Take in ended jobs, and look at the limits of those that have not ended."""
        while not self._ended.empty():
            ended = self._ended.get()
            if isinstance(ended, Lookup):
                self._looked_up(ended)
            elif isinstance(ended, FetchJob):
                self._fetched(ended)
            else:
                self._put(*ended)
        now_ms = self._now_ms()
        self._look_for_hung(now_ms)
        for asked in self._asked.values():
            if not asked.is_over:
                self._look_at(asked, now_ms)
        if self._published:
            self._end_published()
        if self._claims and now_ms - self._renewed_ms >= RENEW_MS:
            self._renewed_ms = now_ms
            for key, record in self._claims.values():
                self._lookers.put(partial(self._shared.renew, key, record))

    def _look_for_hung(self, now_ms: float) -> None:
        """Take the shared store out of use while its calls do not return."""
        last_ms = now_ms - self._terms.timeout_ms
        for lookup, hangs in self._lookups.items():
            if not hangs and lookup.began_ms < last_ms:
                self._lookups[lookup] = True
                self._shared.stalled()
        for job in self._jobs:
            if not job.is_cancelled and job.read_ms < last_ms:
                job.is_cancelled = True
                self._shared.stalled()

    def _look_at(self, asked: _Asked, now_ms: float) -> None:
        """Decide about a request that waits."""
        if asked.lookup is not None:
            if now_ms >= asked.until_ms and not asked.target:
                self._slow += 1
                self._publish(asked, 0)
                self._open(asked)
            elif now_ms >= asked.until_ms:
                self._stop_waiting(asked)
        elif asked.jobs:
            if not asked.jobs & self._jobs:
                self._open(asked)
            elif now_ms >= asked.until_ms:
                self._slow += 1
                self._publish(asked, 0)
                self._open(asked)
        elif now_ms >= asked.until_ms:
            self._stop_waiting(asked)
        elif now_ms >= asked.poll_ms:
            self._look_up(asked)

    def _stop_waiting(self, asked: _Asked) -> None:
        """Compute what another engine did not deliver in time, unless it makes progress."""
        if asked.num_seen < len(asked.levels) < asked.target:
            self._limit_wait(asked)
            return
        self._counts["waited in vain"] += 1
        if asked.lookup is not None:
            asked.lookup.is_abandoned = True
            asked.lookup = None
        self._fetch(asked)

    def _fetched(self, job: FetchJob) -> None:
        """Enter what a job brought into the map, kept for the requests that wait for it."""
        self._jobs.discard(job)
        waiting = [asked for asked in self._asked.values() if job in asked.jobs]
        for key, place, outcome in zip(job.keys, job.places, job.outcomes, strict=True):
            if self._job_of.get(key) is job:
                del self._job_of[key]
            arrived = outcome is Fetched.WHOLE
            if arrived:
                self._store.save(place, key, self._store.room(place))
            self._tier.land(place, arrived=arrived)
            if arrived and self._tier.run((key,)) == [place]:
                for asked in waiting:
                    self._tier.hold((place,))
                    asked.held.append(place)
        took_ms = job.read_ms - job.began_ms
        num_whole = job.outcomes.count(Fetched.WHOLE)
        self._fetch_ms += took_ms
        if num_whole:
            keep = _KEEP**num_whole
            for level in set(job.levels):
                known_ms = self._block_ms[level]
                self._block_ms[level] = keep * known_ms + (1.0 - keep) * took_ms / num_whole
        if num_whole < len(job.keys):
            first = next(at for at, one in enumerate(job.outcomes) if one is not Fetched.WHOLE)
            lacking = job.keys[first:]
            for key in lacking:
                self._stored.pop(key, None)
            for asked in waiting:
                if lacking[0] in asked.keys:
                    self._publish(asked, asked.keys.index(lacking[0]))
        self._has_news = True

    # ---- blocks that go to the store

    def _publish(self, asked: _Asked, num_stored: int) -> None:
        """Have the blocks of a prompt after the first num_stored keys put as they are computed."""
        request = asked.request
        keys = [key for key in asked.keys[num_stored:] if self._lacks(key)]
        if not keys or not self._can_put():
            return
        published = self._published.get(request.request_id)
        if published is None:
            published = _Published((), set())
            self._published[request.request_id] = published
            self._hand_overs.begin(
                request.request_id, self._hand_overs.chain(request, request.prompt_ids)
            )
        known = set(published.keys)
        new = [key for key in keys if key not in known]
        published.keys = (*published.keys, *new)
        published.pending.update(new)
        self._tier.want(new)
        for key in new:
            for place in self._tier.run((key,)):
                self._landed(key, place)

    def _lacks(self, key: bytes) -> bool:
        return key not in self._stored and key not in self._putting

    def _can_put(self) -> bool:
        """Return whether blocks may go to a store, and are not stuck on their way there."""
        is_open = self._disk is not None or self._shared.breaker.may_allow
        return is_open and 2 * len(self._putting) <= self._tier.num_blocks

    def _landed(self, key: bytes, place: int) -> None:
        """Put a block that is in host memory now, if a store lacks it."""
        if not self._tier.wants(key):
            return
        is_new = key not in self._putting
        for published in self._published.values():
            if key in published.pending:
                published.pending.discard(key)
                published.putting.add(key)
        if is_new:
            self._tier.hold((place,))
            self._putting[key] = place
            self._putter.put(partial(self._run_put, key, place))

    def _run_put(self, key: bytes, place: int) -> None:
        """Put a block at each level; in a thread."""
        is_stored = False
        try:
            raw = self._store.room(place)
            if self._disk is not None:
                self._disk.put([key], [raw])
            (is_stored,) = self._shared.put([key], [raw])
        finally:
            self._ended.put((key, is_stored))
            self._wake()

    def _put(self, key: bytes, is_stored: bool) -> None:
        """Take in that a block was put, or not."""
        self._tier.end_fetch(self._putting.pop(key))
        if is_stored:
            self._stored[key] = None
            if len(self._stored) > MAX_STORED:
                self._stored.popitem(last=False)
        for published in self._published.values():
            published.putting.discard(key)

    def _end_published(self) -> None:
        """End what has no block left to save or to put."""
        for request_id, published in list(self._published.items()):
            if published.pending and published.has_ended and not self._hand_overs.num_to_save:
                published.pending = {key for key in published.pending if self._tier.is_awaited(key)}
            if not published.putting and (
                not published.pending and (published.has_ended or self._is_whole(published))
            ):
                del self._published[request_id]
                self._tier.want_no_more(published.keys)
                if not published.has_ended:
                    self._hand_overs.end(request_id)
                self._end_claim(request_id)

    def _is_whole(self, published: _Published) -> bool:
        """Return whether all blocks of a prompt were put."""
        return all(key in self._stored for key in published.keys)

    def _end_claim(self, request_id: str) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self._release_claim(*claim)

    def _release_claim(self, key: bytes, record: bytes) -> None:
        self._lookers.put(partial(self._shared.release, key, record))
