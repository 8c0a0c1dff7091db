"""Exchange: KV blocks that this engine hands over or fetches, as the engine's thread sees it.

A request with a transfer is noticed as its message passes the inbox, and followed in the outputs.
What is handed over is saved to the exchange's store as the scheduler computes it, and kept there
under a lease. What is fetched arrives in the store, and then is loaded into the pool as from any
tier; until it has arrived, or failed to, its request waits at a gate. Knows the scheduler, the map
of places, leases and jobs; sockets are in quire/transfer/links. Always holds: all maps are used in
the engine's thread only; a request waits for jobs that are under way, and these end in time;
whatever fails, the blocks that lack are computed.
"""

from __future__ import annotations

import math
import queue
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.base.block_copies import CopiesEnded
from quire.base.kv_transfer import Failure, KVTransfer, TransferStats
from quire.base.records import NO_BOOLS, NO_INTS, FinishReason, Request, RequestOutput
from quire.base.report import Field, Report
from quire.base.sampling_params import SamplingParams
from quire.base.timeline import WaitReason
from quire.cache.exchange_map import ExchangeMap
from quire.engine.core import Inbox
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Leave,
    Outputs,
    Refused,
    Submit,
    ToEngine,
)
from quire.engine.process.routing import STARTER, id_prefix
from quire.engine.transfer.peers import Peer, Peers
from quire.runner.tier_mover import TierMover
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SequenceState
from quire.transfer.host import HostStore
from quire.transfer.links.block_client import BlockClient, FetchJob, Source
from quire.transfer.links.block_server import BlockServer
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import TRANSFER_ID_BYTES, MessageError
from quire.transfer.links.shared_memory import OwnSegment

# Failures of which the peer is the cause, so that it is not asked again at once.
_OF_THE_PEER = frozenset(
    {Failure.UNREACHABLE, Failure.REFUSED, Failure.CUT, Failure.TIMEOUT, Failure.BAD_BYTES}
)
# A transfer also takes a connection, and a plan to begin and one to go on.
_ROUND_TRIP_MS = 3.0
# How often an idle engine looks for leases that have ended.
_LOOK_EVERY_S = 0.5
# Failures for one reason are logged at most so often; all are counted.
_REPORT_EVERY_MS = 1_000.0
_KEEP = 0.9  # what a transferred block leaves of the estimate before it
_NOTHING_MOVED = CopiesEnded(to_tiers=NO_INTS, to_blocks=NO_INTS, arrived=NO_BOOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How an engine takes part. fetch: when peers are asked, as in the configuration.

    block_ms: how long a block takes on its way, until that is measured.
    """

    vocab_size: int
    block_size: int
    block_bytes: int
    fetch: str
    block_ms: float


@dataclass(slots=True, eq=False)
class _Fetch:
    """One job and the peer that was asked by this engine itself, if any."""

    job: FetchJob
    peer: Peer | None


@dataclass(slots=True)
class _Waiting:
    """A request that has not begun. jobs: what it waits for; held: places kept for it."""

    jobs: set[FetchJob] = field(default_factory=set)
    held: list[int] = field(default_factory=list)


class Exchange:
    """A TierEnd, a Gate and a PrefillDesk, and what watches an engine's messages."""

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        mover: TierMover,
        store: HostStore,
        tier: ExchangeMap,
        leases: LeaseBook,
        peers: Peers,
        terms: Terms,
        now_ms: Callable[[], float],
        report: Report,
    ) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has an ExchangeMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs
        self._mover, self._store, self._tier = mover, store, tier
        self._leases, self._peers, self._terms = leases, peers, terms
        self._now_ms, self._report = now_ms, report
        self._block_ms = terms.block_ms
        self.server: BlockServer | None = None
        self.client: BlockClient | None = None
        self.segment: OwnSegment | None = None  # the store's memory, where others may map it
        self._wake: Callable[[], None] = lambda: None
        self._orders: queue.SimpleQueue[Submit | Abort] = queue.SimpleQueue()
        self._handing: dict[str, bytes] = {}  # transfer ids of live requests, by request id
        self._jobs: dict[FetchJob, _Fetch] = {}  # those under way
        self._job_of: dict[bytes, FetchJob] = {}  # by the digest of a block on its way
        self._waiting: dict[str, _Waiting] = {}
        self._has_news = False
        self._emit: Callable[[FromEngine], None] = lambda message: None
        self._reported = TransferStats()
        self._reported_ms: dict[str, float] = {}
        self._failures: Counter[Failure] = Counter()
        self._received_blocks = self._num_transfers = 0
        self._receive_ms = 0.0
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
        """See TierEnd; blocks that arrived from other engines are in the map already."""
        copies = self._mover.ended()
        if copies is None and self._has_news:
            copies = _NOTHING_MOVED
        self._has_news = False
        return copies

    def clear(self) -> None:
        """See TierEnd: the map has forgotten all places, on their way or not."""
        self._mover.clear()
        self._leases.end_all()
        for fetch in list(self._jobs.values()):
            fetch.job.cancel()
            self._note_end(fetch)
        self._job_of.clear()

    # ---- Gate

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether blocks for `sequence` are on their way from another engine."""
        waiting = self._waiting.get(sequence.request.request_id)
        return waiting is not None and any(job in self._jobs for job in waiting.jobs)

    # ---- PrefillDesk: called in threads of connections

    def prefill(self, transfer_id: bytes, salt: str, token_ids: bytes) -> None:
        """See PrefillDesk. Raises MessageError for ids that the model does not have."""
        prompt = np.frombuffer(token_ids, "<i4").astype(np.int32)
        if prompt.min() < 0 or prompt.max() >= self._terms.vocab_size:
            raise MessageError(f"token ids are 0 to {self._terms.vocab_size - 1}")
        request_id = _own_id(transfer_id)
        request = Request(
            request_id=request_id,
            group_id=request_id,
            stream=0,
            prompt_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0).resolve(),
            stop_ids=(),
            max_total_tokens=len(prompt) + 1,
            arrival_ms=self._now_ms(),
            cache_salt=salt,
            transfer=KVTransfer(transfer_id=transfer_id.hex(), hand_over=True),
        )
        self._orders.put(Submit(requests=(request,)))
        self._wake()

    def cancel(self, transfer_id: bytes) -> None:
        """See PrefillDesk."""
        self._orders.put(Abort(request_ids=(_own_id(transfer_id),)))
        self._wake()

    def settle(self) -> None:
        """See PrefillDesk."""
        self._wake()

    # ---- messages of the engine

    def watched(self, inbox: Inbox) -> Inbox:
        """Return an inbox that also gives requests of other engines, and notices transfers."""
        return _ExchangeInbox(self, inbox)

    def watch(self, emit: Callable[[FromEngine], None]) -> Callable[[FromEngine], None]:
        """Return an `emit` that notices what became of requests; own ones are not passed on."""

        def watched(message: FromEngine) -> None:
            if isinstance(message, Refused):
                for request_id in message.request_ids:
                    self._refused(request_id, message.fault.message)
                if message.request_ids[0].startswith(_OWN_PREFIX):
                    return
            elif isinstance(message, Outputs):
                message.stats.transfer = self._reported = self.stats()
                message = self._seen(message)
            emit(message)

        self._emit = watched
        return watched

    def shortened(self, wait_s: float | None) -> float | None:
        """Return how long an idle engine may wait: leases end by time."""
        if not len(self._leases):
            return wait_s
        return _LOOK_EVERY_S if wait_s is None else min(wait_s, _LOOK_EVERY_S)

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Notice transfers in messages that the engine handles next; return them and own ones."""
        while not self._orders.empty():
            order = self._orders.get()
            messages.append(order)
            if isinstance(order, Abort):  # its connection has ended
                self._leases.give_up(bytes.fromhex(order.request_ids[0].removeprefix(_OWN_PREFIX)))
        for message in messages:
            if isinstance(message, Submit):
                self._begin(message.requests[0])
            elif isinstance(message, Abort):
                self._drop(message.request_ids)
            elif isinstance(message, Leave):
                prefix = id_prefix(message.client)
                for request_id in [*self._waiting, *self._handing]:
                    if request_id.startswith(prefix):  # no output says that it has ended
                        self._refused(request_id, "its client is gone")
        self._take_in()
        if not messages and not self._scheduler.has_work and self.stats() != self._reported:
            self._emit(Outputs(outputs=None, stats=self._scheduler.stats()))
        return messages

    def stats(self) -> TransferStats:
        """Return counters and gauges."""
        sent = self.server.counts if self.server is not None else None
        return TransferStats(
            leases=len(self._leases),
            fetching=len(self._jobs),
            sent_blocks_total=sent.blocks_total if sent is not None else 0,
            sent_bytes_total=sent.bytes_total if sent is not None else 0,
            received_blocks_total=self._received_blocks,
            received_bytes_total=self._received_blocks * self._terms.block_bytes,
            receive_ms_total=self._receive_ms,
            transfers_total=self._num_transfers,
            failures_total=tuple((one.value, self._failures[one]) for one in Failure),
        )

    def close(self) -> None:
        """End all connections and threads."""
        if self.server is not None:
            self.server.close()
        if self.client is not None:
            self.client.close()
        if self.segment is not None:
            self.segment.close()

    # ---- requests

    def _begin(self, request: Request) -> None:
        wish = request.transfer
        if wish is None:
            if len(self._peers) and self.client is not None and self._terms.fetch != "never":
                self._ask_peer(request)
        elif wish.hand_over:
            self._hand_over(request, bytes.fromhex(wish.transfer_id))
        elif not _is_suited(request):
            self._failures[Failure.UNSUITED] += 1
        else:
            chain = self._hand_overs.chain(request, request.known_ids)
            keys = self._hand_overs.lacking(chain)
            if wish.block_ids is not None:
                first, offered = len(chain.digests) - len(keys), set(wish.block_ids)
                here = (at for at in range(len(keys)) if first + at not in offered)
                keys = keys[: next(here, len(keys))]
            transfer_id = bytes.fromhex(wish.transfer_id)
            source = Source(
                host=wish.host, port=wish.port, transfer_id=transfer_id, engine_id=wish.engine_id
            )
            self._fetch(request, keys, source, None)

    def _hand_over(self, request: Request, transfer_id: bytes) -> None:
        chain = self._hand_overs.chain(request, request.prompt_ids)
        keys = chain.keys
        if not keys:
            return  # shorter than a block
        if self._leases.open(transfer_id, keys) is None:
            self._report("KV transfer: too many leases are open; a prompt is not kept")
            return
        self._tier.want(keys)
        for key in keys:
            for place in self._tier.run((key,)):
                self._landed(key, place)
        self._hand_overs.begin(request.request_id, chain)
        self._handing[request.request_id] = transfer_id

    def _ask_peer(self, request: Request) -> None:
        """Have a peer compute what this engine lacks of a prompt, where that pays."""
        if not _is_suited(request):
            return
        chain = self._hand_overs.chain(request, request.known_ids)
        keys = self._hand_overs.lacking(chain)
        if not keys or not self._pays(len(chain.digests), len(keys)):
            return
        peer = self._peers.choose(self._now_ms())
        if peer is None:
            self._failures[Failure.NO_PEER] += 1
            return
        num_tokens = len(chain.digests) * self._terms.block_size
        source = Source(
            host=peer.host,
            port=peer.port,
            transfer_id=secrets.token_bytes(TRANSFER_ID_BYTES),
            salt=request.cache_salt,
            token_ids=request.known_ids[:num_tokens].astype("<i4").tobytes(),
        )
        if not self._fetch(request, keys, source, peer):
            self._peers.ended(peer, self._now_ms(), failed=False)

    def _pays(self, num_blocks: int, num_lacking: int) -> bool:
        if self._terms.fetch == "always":
            return True
        size = self._terms.block_size
        compute_ms = self._scheduler.speed.span_ms(
            (num_blocks - num_lacking) * size, num_blocks * size
        )
        return _ROUND_TRIP_MS + num_lacking * self._block_ms < compute_ms

    def _fetch(
        self, request: Request, keys: Sequence[bytes], source: Source, peer: Peer | None
    ) -> bool:
        """Begin to fetch blocks; return whether any are on their way because of this.

        A peer computes the whole prompt, so it is not asked for less than half of the blocks.
        """
        waiting, own, places = _Waiting(), [], []
        for key in keys:
            if (job := self._job_of.get(key)) is not None:
                waiting.jobs.add(job)  # for another request that begins alike
                continue
            place = self._tier.await_block(key)
            if place is None:
                self._failures[Failure.NO_ROOM] += 1
                break
            own.append(key)
            places.append(place)
        if peer is not None and 2 * len(own) < len(keys):
            for place in places:
                self._tier.land(place, arrived=False)
            own.clear()
        if own and self.client is not None:
            job = FetchJob(source, own, places)
            self._jobs[job] = _Fetch(job, peer)
            self._job_of |= dict.fromkeys(own, job)
            waiting.jobs.add(job)
            self._num_transfers += 1
            self.client.start(job)
        if waiting.jobs:
            self._waiting[request.request_id] = waiting
        return bool(own)

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Note that requests are aborted. A job goes on only while another request waits for it."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is None:
                continue
            self._release(waiting)
            for job in waiting.jobs & self._jobs.keys():
                if not any(job in other.jobs for other in self._waiting.values()):
                    job.cancel()
                    self._resolve(job)

    def _refused(self, request_id: str, why: str) -> None:
        """Note that the engine did not take a request, or gave it up."""
        self._drop((request_id,))
        transfer_id = self._handing.pop(request_id, None)
        if transfer_id is not None:
            self._hand_overs.end(request_id)
            self._leases.fail(transfer_id, why)

    def _seen(self, message: Outputs) -> Outputs:
        """Take note of a step's events; return them without those of own requests."""
        outputs = message.outputs
        if outputs is None or not (self._waiting or self._handing):
            return message
        has_own = False
        for event in outputs.events:
            has_own |= event.request_id.startswith(_OWN_PREFIX)
            self._note_event(event)
        if not has_own:
            return message
        events = tuple(one for one in outputs.events if not one.request_id.startswith(_OWN_PREFIX))
        return replace(message, outputs=replace(outputs, events=events))

    def _note_event(self, event: RequestOutput) -> None:
        request_id, reason = event.request_id, event.finish_reason
        waiting = self._waiting.get(request_id)
        if waiting is not None and (reason is not None or event.token_ids):
            self._drop((request_id,))
        transfer_id = self._handing.get(request_id) if reason is not None else None
        if transfer_id is not None:
            del self._handing[request_id]
            self._hand_overs.end(request_id)
            self._leases.completed(transfer_id)
            if reason is FinishReason.ERROR:
                self._leases.fail(transfer_id, event.error or "the prompt could not be computed")

    # ---- blocks

    def _landed(self, key: bytes, place: int) -> None:
        """Keep a block that is in the store now for the leases that it is of."""
        self._tier.hold(place for _ in self._leases.landed(key, place))

    def _take_in(self) -> None:
        """Take in ended jobs and leases; find out what will not be saved any more."""
        for job in self.client.ended() if self.client is not None else ():
            if job in self._jobs:  # not cancelled before
                self._resolve(job)
                self._has_news = True
        if not len(self._leases):
            self._give_up_ended()
            return
        if not self._hand_overs.num_to_save:
            for lease in self._leases.complete():
                gone = {key for key in lease.pending if not self._tier.knows(key)}
                if gone:
                    self._leases.lost(lease, gone)
        self._give_up_ended()

    def _give_up_ended(self) -> None:
        for lease in self._leases.take_ended():
            self._tier.want_no_more(lease.keys)
            for place in lease.places.values():
                self._tier.end_fetch(place)

    def _resolve(self, job: FetchJob) -> None:
        """Enter what a job brought into the map, kept for the requests that wait for it."""
        fetch = self._jobs[job]
        for at, (key, place) in enumerate(zip(job.digests, job.places, strict=True)):
            self._job_of.pop(key, None)
            arrived = at < job.num_landed
            if arrived:
                self._store.save(place, key, self._store.room(place))
            self._tier.land(place, arrived=arrived)
            if arrived and self._tier.run((key,)) == [place]:
                for waiting in self._waiting.values():
                    if job in waiting.jobs:
                        self._tier.hold((place,))
                        waiting.held.append(place)
        self._note_end(fetch)

    def _note_end(self, fetch: _Fetch) -> None:
        """Count what a job brought, and why it brought no more."""
        job = fetch.job
        del self._jobs[job]
        self._received_blocks += job.num_landed
        self._receive_ms += job.receive_ms
        if job.num_landed:
            keep = _KEEP**job.num_landed
            block_ms = job.receive_ms / job.num_landed
            self._block_ms = keep * self._block_ms + (1.0 - keep) * block_ms
        if job.failure is not None:
            self._failures[job.failure] += 1
            self._report_failure(
                "KV transfer failed; the blocks that lack are computed here",
                reason=job.failure.value,
                detail=job.detail,
                peer=f"{job.source.host}:{job.source.port}",
                arrived_blocks=job.num_landed,
                wanted_blocks=len(job.digests),
            )
        if fetch.peer is not None:
            failed = job.failure in _OF_THE_PEER
            self._peers.ended(fetch.peer, self._now_ms(), failed=failed)

    def _report_failure(self, what: str, *, reason: str, **fields: Field) -> None:
        """Report a failure, unless one for this reason was reported a moment ago."""
        now_ms = self._now_ms()
        if now_ms - self._reported_ms.get(reason, -math.inf) >= _REPORT_EVERY_MS:
            self._reported_ms[reason] = now_ms
            self._report(what, reason=reason, **fields)

    def _release(self, waiting: _Waiting) -> None:
        for place in waiting.held:
            self._tier.end_fetch(place)
        waiting.held.clear()


_OWN_PREFIX = f"{STARTER}/kv/"


def _own_id(transfer_id: bytes) -> str:
    return f"{_OWN_PREFIX}{transfer_id.hex()}"


def _is_suited(request: Request) -> bool:
    """Return whether blocks that another engine computed are of use to a request."""
    sampling = request.sampling
    return sampling.prompt_logprobs is None and sampling.pooling is None


class _ExchangeInbox:
    """See Exchange.watched."""

    def __init__(self, exchange: Exchange, inbox: Inbox) -> None:
        self._exchange, self._inbox = exchange, inbox

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        return self._exchange.take(self._inbox.take(self._exchange.shortened(wait_s)))

    def wake(self) -> None:
        """See Inbox."""
        self._inbox.wake()
