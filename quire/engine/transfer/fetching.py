"""Fetching: requests for which KV blocks of the prompt come from other engines.

A request says where its blocks are, or a prefill engine among the peers is asked to compute them
where that is predicted to cost less than computing them here (placement.py): by the load that was
seen of the peer, then by the one that it sends when the connection opens. What is fetched arrives
in the exchange's store, and is loaded into the pool while the rest is on its way (early_loads.py);
until all has arrived, or failed to, its request waits at a gate. Where there is a shared store
(`levels`), it is asked first, and what it has is not fetched here. Knows jobs, peers, the map of
places and requests; all of it in the engine's thread. Always holds: a request waits for jobs that
are under way, and these end in time; whatever fails, missing blocks are computed.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quire.base.kv_transfer import Failure, KVTransfer
from quire.base.records import Request, RequestOutput
from quire.base.report import Field, Report
from quire.base.timeline import WaitReason
from quire.cache.exchange_map import ExchangeMap
from quire.engine.early_loads import EarlyLoads
from quire.engine.outside_blocks import Levels, can_use_outside_blocks
from quire.engine.transfer.link_times import LinkTimes
from quire.engine.transfer.own_load import OwnLoad
from quire.engine.transfer.peers import Peer, Peers
from quire.engine.transfer.placement import Placement
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.transfer.host import HostStore
from quire.transfer.links.block_client import FetchJob, Source
from quire.transfer.links.messages import TRANSFER_ID_BYTES

# Failures of which the peer is the cause, so that it is not asked again at once.
_OF_THE_PEER = frozenset(
    {Failure.UNREACHABLE, Failure.REFUSED, Failure.CUT, Failure.TIMEOUT, Failure.BAD_BYTES}
)
# Failures for one reason are logged at most so often; all are counted.
_REPORT_EVERY_MS = 1_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTerms:
    """When peers are asked. fetch: as in the configuration.

    block_ms: how long a block takes on its way, until that is measured.
    """

    block_size: int
    fetch: str
    block_ms: float


@dataclass(slots=True, eq=False)
class _Fetch:
    """One job, and the peer that was asked by this engine itself, if any, for the prompt of
    `placement`. has_load: whether the load of the peer was noted. num_landed: blocks that are in
    the map."""

    job: FetchJob
    peer: Peer | None
    placement: Placement | None = None
    has_load: bool = False
    num_landed: int = 0


@dataclass(slots=True)
class _Waiting:
    """A request that has not begun. jobs: what it waits for; held: places kept for it."""

    jobs: set[FetchJob] = field(default_factory=set)
    held: list[int] = field(default_factory=list)


class _Link:
    """A Link (see outside_blocks.py) of one request. keys: the blocks that it may bring.

    origin: the engine that has them; or what having a peer compute them costs.
    """

    def __init__(
        self,
        fetching: Fetching,
        request: Request,
        keys: Sequence[bytes],
        origin: Source | Placement,
    ) -> None:
        self._fetching = fetching
        self.request, self.keys = request, keys
        self.source = origin if isinstance(origin, Source) else None
        self.placement = origin if isinstance(origin, Placement) else None

    @property
    def block_ms(self) -> float:
        """See Link."""
        source = self.source
        return math.inf if source is None else self._fetching.links.block_ms(source.host)

    def begin(self, num_elsewhere: int) -> int:
        """See Link."""
        return self._fetching.use(self, num_elsewhere)


class Connections(Protocol):
    """Runs jobs beside the engine's thread, which makes all calls: a BlockClient."""

    def start(self, job: FetchJob) -> None:
        """Begin a job."""

    def ended(self) -> list[FetchJob]:
        """Return the jobs that have ended since the last call."""

    def close(self) -> None:
        """Cancel all jobs."""


class Fetching:
    """A Gate of `scheduler`. client: of connections; None for an engine that fetches nothing."""

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: HostStore,
        tier: ExchangeMap,
        peers: Peers,
        own: OwnLoad,
        terms: FetchTerms,
        now_ms: Callable[[], float],
        report: Report,
    ) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has an ExchangeMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs
        self._store, self._tier = store, tier
        self._peers, self._own, self._terms = peers, own, terms
        self._now_ms, self._report = now_ms, report
        self.links = LinkTimes(terms.block_ms)
        self.client: Connections | None = None
        self.levels: Levels | None = None  # a store, which is asked first
        self._jobs: dict[FetchJob, _Fetch] = {}  # those under way
        self._job_of: dict[bytes, FetchJob] = {}  # by the digest of a block on its way
        self._waiting: dict[str, _Waiting] = {}
        self._planned: dict[str, _Link] = {}  # by request; a store is asked before them
        self.early = EarlyLoads(self._hand_overs)
        self._reported_ms: dict[str, float] = {}
        self.failures: Counter[Failure] = Counter()
        self.num_received = self.num_early = self.num_transfers = 0
        self.receive_ms = 0.0
        scheduler.add_gate(self)

    @property
    def num_jobs(self) -> int:
        """Transfers that are under way."""
        return len(self._jobs)

    @property
    def has_requests(self) -> bool:
        """Whether a request has not begun because of a transfer."""
        return bool(self._waiting or self._planned)

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not begun because of a transfer."""
        return [*self._waiting, *self._planned]

    # ---- Gate

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether blocks for `sequence` are on their way from another engine."""
        request_id = sequence.request.request_id
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        if not waiting.jobs.isdisjoint(self._jobs) or self.early.are_under_way(request_id):
            return True
        sequence.kv.num_fetched_blocks += self.early.take_count(request_id)
        return False

    # ---- requests

    def begin(self, request: Request, wish: KVTransfer) -> None:
        """Fetch the blocks of a request from the engine that it names."""
        transfer_id = bytes.fromhex(wish.transfer_id)
        source = Source(
            host=wish.host, port=wish.port, transfer_id=transfer_id, engine_id=wish.engine_id
        )
        keys: Sequence[bytes] = ()
        if not can_use_outside_blocks(request):
            self.failures[Failure.UNSUITED] += 1
        else:
            chain = self._hand_overs.chain(request, request.known_ids)
            keys = self._hand_overs.lacking(chain)
            if wish.block_ids is not None:
                first, offered = len(chain.digests) - len(keys), set(wish.block_ids)
                here = (at for at in range(len(keys)) if first + at not in offered)
                keys = keys[: next(here, len(keys))]
        self._plan(_Link(self, request, keys, source))

    def ask_peer(self, request: Request) -> None:
        """Have a peer compute what this engine lacks of a prompt, where that pays."""
        if not len(self._peers) or self.client is None or self._terms.fetch == "never":
            return
        if not can_use_outside_blocks(request):
            return
        chain = self._hand_overs.chain(request, request.known_ids)
        keys = self._hand_overs.lacking(chain)
        if not keys:
            return
        placement = self._placement(len(chain.digests), len(keys))
        peer = self._best(placement)
        if self._is_forced or self._pays(placement, peer):
            self._plan(_Link(self, request, keys, placement))

    def use(self, link: _Link, num_elsewhere: int) -> int:
        """See Link."""
        self._planned.pop(link.request.request_id, None)
        keys = link.keys[num_elsewhere:]
        if link.source is None:
            return self._ask(link, keys) if keys else 0
        has_own = self._fetch(link.request, keys, link.source)
        if not has_own:
            self._release_lease(link.source)
        return self._num_coming(keys)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Note that requests are aborted. A job goes on only while another request waits for it."""
        for request_id in request_ids:
            link = self._planned.pop(request_id, None)
            if link is not None and link.source is not None:
                self._release_lease(link.source)
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                continue
            self._release(waiting)
            self.early.end(request_id)
            for job in waiting.jobs & self._jobs.keys():
                if not any(job in other.jobs for other in self._waiting.values()):
                    job.cancel()
                    self._resolve(job)

    def note_event(self, event: RequestOutput) -> None:
        """Note that a request has begun or ended, and waits no longer."""
        if (event.request_id in self._waiting or event.request_id in self._planned) and (
            event.finish_reason is not None or event.token_ids
        ):
            self.drop((event.request_id,))

    def take_in(self) -> bool:
        """Take in ended jobs; return whether there were any."""
        self._note_loads()
        has_news = False
        for job in self.client.ended() if self.client is not None else ():
            if job in self._jobs:  # not cancelled before
                self._resolve(job)
                has_news = True
        for fetch in self._jobs.values():
            self._land(fetch)
        return has_news

    def clear(self) -> None:
        """End all jobs: the map has forgotten all places, on their way or not."""
        for fetch in list(self._jobs.values()):
            fetch.job.cancel()
            for place in fetch.job.places[fetch.num_landed :]:  # nothing writes into them any more
                self._tier.land(place, arrived=False)
            self._note_end(fetch)
        self._job_of.clear()

    # ---- jobs

    def _plan(self, link: _Link) -> None:
        """Fetch what a link may bring, after what a store has."""
        if self.levels is None or not link.keys:
            self.use(link, 0)
            return
        self._planned[link.request.request_id] = link
        self.levels.begin(link.request, link)

    def _ask(self, link: _Link, keys: Sequence[bytes]) -> int:
        """Have a peer compute a prompt for its last blocks `keys`; return how many come."""
        request = link.request
        assert link.placement is not None, "of a link without a source"
        size = self._terms.block_size
        placement = link.placement.after((len(link.keys) - len(keys)) * size)
        peer = self._best(placement)
        if peer is None:
            self.failures[Failure.NO_PEER] += 1
            return 0
        if not self._is_forced and not self._pays(placement, peer):
            return 0
        placement = self._over(placement, peer)
        num_tokens = len(request.known_ids) // size * size
        source = Source(
            host=peer.host,
            port=peer.port,
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            salt=request.cache_salt,
            token_ids=request.known_ids[:num_tokens].astype("<i4").tobytes(),
        )
        if self._fetch(request, keys, source, peer, placement):
            peer.note_asked(placement.start, placement.end, self._now_ms())
        return self._num_coming(keys)

    def _num_coming(self, keys: Sequence[bytes]) -> int:
        """Return how many keys are on their way from engines, from the first on."""
        lacking = (at for at, key in enumerate(keys) if not self._is_coming(key))
        return next(lacking, len(keys))

    def _is_coming(self, key: bytes) -> bool:
        return key in self._job_of or bool(self._tier.run((key,)))

    def _release_lease(self, source: Source) -> None:
        """Let another engine end a lease of which nothing is fetched any more."""
        sources = [job.source for job in self._jobs]
        sources += [link.source for link in self._planned.values() if link.source is not None]
        if self.client is None or any(one.transfer_id == source.transfer_id for one in sources):
            return
        self.client.start(FetchJob(source, (), ()))

    @property
    def _is_forced(self) -> bool:
        return self._terms.fetch == "always"

    def _placement(self, num_blocks: int, num_lacking: int) -> Placement:
        """Return what a prompt costs of which the last blocks lack, without the link.

        Prompts that wait for blocks on their way are not computed here.
        """
        size, here = self._terms.block_size, self._own.now()
        spared_ms = sum(len(job.digests) for job in self._jobs) * size * here.token_ms
        return Placement(
            start=(num_blocks - num_lacking) * size,
            end=num_blocks * size,
            moving_ms=0.0,
            here=replace(here, queue_ms=max(here.queue_ms - spared_ms, 0.0)),
            num_decoding=self._own.num_decoding,
        )

    def _over(self, placement: Placement, peer: Peer | None) -> Placement:
        """Return a placement with the time of its blocks on their way from a peer."""
        num_blocks = (placement.end - placement.start) // self._terms.block_size
        block_ms = self.links.block_ms("" if peer is None else peer.host)
        return replace(placement, moving_ms=num_blocks * block_ms)

    def _best(self, placement: Placement) -> Peer | None:
        """Return the peer that has a prompt here soonest."""
        return self._peers.best(
            self._now_ms(), lambda peer, load: self._over(placement, peer).remote_ms(load)
        )

    def _pays(self, placement: Placement, peer: Peer | None) -> bool:
        """Return whether to have a peer compute a prompt. None: all failed recently."""
        placement = self._over(placement, peer)
        if peer is not None and not placement.is_worth_moving:
            self.links.fade(peer.host)
        return placement.pays(None if peer is None else peer.load_at(self._now_ms()))

    def _fetch(
        self,
        request: Request,
        keys: Sequence[bytes],
        source: Source,
        peer: Peer | None = None,
        placement: Placement | None = None,
    ) -> bool:
        """Begin to fetch blocks; return whether any are on their way because of this.

        A peer computes the whole prompt, so it is not asked for less than half of the blocks.
        """
        waiting, own, places = _Waiting(), [], []
        for key in keys:
            if (job := self._job_of.get(key)) is not None:
                waiting.jobs.add(job)  # for another request that begins alike
                continue
            if self._tier.run((key,)):
                continue  # it is here
            if self._tier.is_awaited(key):
                break  # from the pool, or from a store for another request
            place = self._tier.await_block(key)
            if place is None:
                self.failures[Failure.NO_ROOM] += 1
                break
            own.append(key)
            places.append(place)
        if peer is not None and 2 * len(own) < len(keys):
            for place in places:
                self._tier.land(place, arrived=False)
            own.clear()
        if own and self.client is not None:
            job = FetchJob(source, own, places)
            if placement is not None and not self._is_forced:
                job.accepts = placement.pays
            self._jobs[job] = _Fetch(job, peer, placement)
            self._job_of |= dict.fromkeys(own, job)
            waiting.jobs.add(job)
            self.num_transfers += 1
            self.client.start(job)
        if waiting.jobs:
            self._waiting[request.request_id] = waiting
            self.early.begin(request)
        return bool(own)

    def _resolve(self, job: FetchJob) -> None:
        """Enter what a job brought into the map; what it did not bring may be looked up again."""
        fetch = self._jobs[job]
        self._land(fetch)
        for key, place in self._left(fetch):
            self._job_of.pop(key, None)
            self._tier.land(place, arrived=False)
        self._note_end(fetch)
        if self.levels is not None and job.num_landed < len(job.digests):
            for request_id, _ in self._users(job):
                self.levels.look_again(request_id)

    def _land(self, fetch: _Fetch) -> None:
        """Enter what has landed since into the map, kept for the requests that wait for it, and
        load it into the pool."""
        job, num_new = fetch.job, fetch.job.num_landed - fetch.num_landed
        if not num_new:
            return
        users = self._users(job)
        for key, place in self._left(fetch)[:num_new]:
            self._job_of.pop(key, None)
            self._store.save(place, key, self._store.room(place))
            self._tier.land(place, arrived=True)
            if self._tier.run((key,)) == [place]:
                for _, waiting in users:
                    self._tier.hold((place,))
                    waiting.held.append(place)
        fetch.num_landed += num_new
        self.num_received += num_new
        is_last = fetch.num_landed == len(job.digests)
        for request_id, _ in users:
            num_loaded = self.early.load(request_id)
            self.num_early += 0 if is_last else num_loaded

    def _left(self, fetch: _Fetch) -> list[tuple[bytes, int]]:
        """Return the blocks of a job that are not in the map."""
        job, first = fetch.job, fetch.num_landed
        return [*zip(job.digests[first:], job.places[first:], strict=True)]

    def _users(self, job: FetchJob) -> list[tuple[str, _Waiting]]:
        """Return the requests that wait for a job."""
        return [(id_, waiting) for id_, waiting in self._waiting.items() if job in waiting.jobs]

    def _note_loads(self) -> None:
        """Take in the loads of peers to which connections have opened."""
        new = [one for one in self._jobs.values() if not one.has_load and one.job.load is not None]
        for fetch in new:
            peer, load = fetch.peer, fetch.job.load
            if peer is None or load is None:
                continue
            # It sent this before it was asked for these prompts.
            coming = [one for one in self._jobs.values() if one.peer is peer and not one.has_load]
            load = load.as_fast_as(self._own.now())
            spans = [one.placement for one in coming if one.placement is not None]
            asked_ms = sum(load.prompt_ms(one.start, one.end) for one in spans)
            peer.note_load(load, asked_ms, self._now_ms())
        for fetch in new:
            fetch.has_load = True

    def _note_end(self, fetch: _Fetch) -> None:
        """Count what a job brought, and why it brought no more."""
        job = fetch.job
        del self._jobs[job]
        self.receive_ms += job.receive_ms
        if job.num_landed:
            self.links.note(job.source.host, job.num_landed, job.receive_ms)
        if job.failure is not None:
            self.failures[job.failure] += 1
        if job.failure not in (None, Failure.BUSY):  # which is as intended
            self._report_failure(
                "KV transfer failed; the blocks that lack are computed here",
                reason=str(job.failure),
                detail=job.detail,
                peer=f"{job.source.host}:{job.source.port}",
                arrived_blocks=job.num_landed,
                wanted_blocks=len(job.digests),
            )
        if fetch.peer is None:
            if job.is_cancelled:  # maybe before its thread has said anything
                self._release_lease(job.source)
        else:
            failed, now_ms = job.failure in _OF_THE_PEER, self._now_ms()
            if job.failure is Failure.BUSY and job.load is not None:  # it was not asked for this
                fetch.peer.note_load(job.load.as_fast_as(self._own.now()), 0.0, now_ms)
            self._peers.ended(fetch.peer, now_ms, failed=failed)

    def _report_failure(self, what: str, *, reason: str, **fields: Field) -> None:
        """Report a failure, unless one for this reason was reported a moment ago."""
        now_ms = self._now_ms()
        if now_ms - self._reported_ms.get(reason, -math.inf) >= _REPORT_EVERY_MS:
            self._reported_ms[reason] = now_ms
            self._report(what, reason=reason, **fields)

    def _release(self, waiting: _Waiting) -> None:
        for place in waiting.held:
            self._tier.end_fetch(place)
