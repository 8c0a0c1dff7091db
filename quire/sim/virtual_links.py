"""Links between simulated engines: KV blocks that one hands over and another fetches.

What is handed over, asked for and fetched is decided by the engines' own code
(quire/engine/transfer). Only what connections do takes virtual time: a message the latency, a block
its time on the link into the fetching engine, one after another, from when it has reached the other
engine's memory. Nothing is lost on the way, and no connection breaks. Always holds: a transfer ends
once, with its first blocks in their places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from quire.base.kv_transfer import Failure
from quire.engine.transfer.handing import Handing
from quire.sim.events import EngineEvents
from quire.transfer.links.block_client import FetchJob
from quire.transfer.links.block_server import ASK_S
from quire.transfer.links.leases import Lease, LeaseBook


class TimedLeases(LeaseBook):
    """A LeaseBook that knows when each block has landed."""

    def __init__(self, now_ms: Callable[[], float], keep_ms: float) -> None:
        super().__init__(now_ms, keep_ms)
        self._clock_ms = now_ms
        self._landed_ms: dict[Lease, dict[bytes, float]] = {}

    def landed(self, key: bytes, place: int) -> list[Lease]:
        """See LeaseBook."""
        holding = super().landed(key, place)
        for lease in holding:
            self._landed_ms.setdefault(lease, {})[key] = self._clock_ms()
        return holding

    def landed_ms(self, lease: Lease, key: bytes) -> float | None:
        """Return when a block of a lease has landed; None: not yet."""
        return self._landed_ms.get(lease, {}).get(key)

    def take_ended(self) -> list[Lease]:
        """See LeaseBook."""
        ended = super().take_ended()
        for lease in ended:
            self._landed_ms.pop(lease, None)
        return ended


@dataclass(slots=True, kw_only=True, eq=False)
class HandingSide:
    """An engine that hands blocks over. due_ms: up to when it is known what it has done."""

    handing: Handing
    leases: TimedLeases
    events: EngineEvents
    due_ms: Callable[[], float] = lambda: math.inf


@dataclass(slots=True, eq=False)
class _Transfer:
    """A job under way. asked_ms: when the other engine knows of it, and sends its load;
    is_refused: whether it is then too busy; num_sent: blocks that have been on the link; due_ms:
    when to go on, inf: not known."""

    job: FetchJob
    other: HandingSide
    asked_ms: float
    is_refused: bool = False
    lease: Lease | None = None
    num_sent: int = 0
    due_ms: float = 0.0


class VirtualConnections:
    """The Connections (see fetching.py) of one engine. others: by the host of a source.

    block_ms: a block's time on the link.
    """

    def __init__(
        self,
        events: EngineEvents,
        others: Mapping[str, HandingSide],
        *,
        latency_ms: float,
        block_ms: float,
    ) -> None:
        self._events, self._others = events, others
        self._latency_ms, self._block_ms = latency_ms, block_ms
        self._live: list[_Transfer] = []
        self._ended: list[FetchJob] = []
        self._free_ms = 0.0  # when the link is free for the next block

    def __len__(self) -> int:
        """How many transfers go on."""
        return len(self._live)

    def start(self, job: FetchJob) -> None:
        """See Connections."""
        source, asked_ms = job.source, self._events.now_ms() + self._latency_ms
        other = self._others[source.host]
        if not job.digests:
            other.events.at(asked_ms, partial(other.leases.give_up, source.transfer_id))
            self._ended.append(job)
            return
        transfer = _Transfer(job, other, asked_ms)
        other.events.at(asked_ms, partial(_meet, transfer))
        self._live.append(transfer)

    def ended(self) -> list[FetchJob]:
        """See Connections."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """See Connections."""
        self._live.clear()

    def next_ms(self) -> float:
        """Return when a transfer goes on, or up to when that is open."""
        return min(
            (one.due_ms if one.due_ms < math.inf else one.other.due_ms() for one in self._live),
            default=math.inf,
        )

    def advance(self) -> None:
        """Move what has landed at other engines by now."""
        for transfer in list(self._live):
            self._advance(transfer)

    def _advance(self, transfer: _Transfer) -> None:
        job, now_ms = transfer.job, self._events.now_ms()
        if job.is_cancelled:
            self._end(transfer, None)
            return
        if transfer.is_refused:
            transfer.due_ms = transfer.asked_ms + self._latency_ms
            if transfer.due_ms <= now_ms:
                self._end(transfer, Failure.BUSY)
            return
        if transfer.lease is None and not self._claim(transfer):
            return
        assert transfer.lease is not None, "claimed"
        while transfer.num_sent < len(job.digests):
            key = job.digests[transfer.num_sent]
            landed_ms = transfer.other.leases.landed_ms(transfer.lease, key)
            if landed_ms is None:
                self._wait_for(transfer, key)
                return
            ready_ms = max(landed_ms, transfer.asked_ms) + self._latency_ms
            if ready_ms > now_ms:
                transfer.due_ms = ready_ms
                return
            self._free_ms = max(ready_ms, self._free_ms) + self._block_ms
            transfer.num_sent += 1
            transfer.due_ms = self._free_ms
        if transfer.due_ms <= now_ms:
            self._end(transfer, None)

    def _claim(self, transfer: _Transfer) -> bool:
        """Find the lease, which the other engine opens when it takes the request."""
        source, now_ms = transfer.job.source, self._events.now_ms()
        transfer.lease = transfer.other.leases.claim(source.transfer_id, 0.0)
        if transfer.lease is not None:
            return True
        wait_ms = 1e3 * ASK_S if source.token_ids else 0.0
        if now_ms >= transfer.asked_ms + wait_ms + self._latency_ms:
            self._end(transfer, Failure.EXPIRED)
        else:
            self._wait(transfer, transfer.asked_ms + wait_ms + self._latency_ms)
        return False

    def _wait_for(self, transfer: _Transfer, key: bytes) -> None:
        """Wait for a block that is still computed, unless it will not come."""
        lease = transfer.lease
        assert lease is not None, "claimed"
        if not lease.valid:
            self._end(transfer, Failure.EXPIRED)
        elif key in lease.lost:
            self._end(transfer, Failure.MISSING)
        else:
            self._wait(transfer, math.inf)

    def _wait(self, transfer: _Transfer, limit_ms: float) -> None:
        """Wait for the other engine; let an idle one look after its leases."""
        other = transfer.other
        transfer.due_ms = min(other.due_ms(), limit_ms)
        if transfer.due_ms == math.inf:
            other.events.at(self._events.now_ms(), _nothing)

    def _end(self, transfer: _Transfer, failure: Failure | None) -> None:
        """End a transfer; the other engine ends its lease when it hears of that."""
        job, other, lease = transfer.job, transfer.other, transfer.lease
        self._live.remove(transfer)
        job.num_landed, job.failure = transfer.num_sent, failure
        job.receive_ms = transfer.num_sent * self._block_ms
        self._ended.append(job)
        heard_ms, id_ = self._events.now_ms() + self._latency_ms, job.source.transfer_id
        if lease is not None:
            other.events.at(heard_ms, partial(other.leases.let_go, id_, lease, is_over=True))
        if job.source.token_ids and failure is not Failure.BUSY:
            other.events.at(heard_ms, partial(other.handing.cancel, id_))


def _meet(transfer: _Transfer) -> None:
    """Have the other engine send its load, and compute the prompt unless it is too busy."""
    job, handing = transfer.job, transfer.other.handing
    handing.note_step()  # of all steps before this moment
    job.load = handing.load()
    transfer.is_refused = job.accepts is not None and not job.accepts(job.load)
    if job.source.token_ids and not transfer.is_refused:
        source = job.source
        handing.prefill(source.transfer_id, source.salt, source.token_ids)


def _nothing() -> None:
    """Have an engine look at what belongs to it."""
