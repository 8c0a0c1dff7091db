"""Beats: the signs of life of one replica, on a connection of their own (GET /health/beats).

A thread of the server writes them, beside its event loop and its engine: a long step, a long prompt
or a thousand streams do not hold them up, so they stop only where the process stops, or the
network. Events between them say at once when the health changes, as where an engine has died. Reads
no clock but the connection's. Always holds: a replica without beats is judged by its answers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection

import msgspec

from quire.router.faults import ReplicaFault
from quire.router.fleet import Fleet
from quire.router.http_client import ConnectionPool, Exchange, Headers
from quire.router.replica import Replica

PATH = b"/health/beats"
_TYPE, _EVENTS = b"content-type", b"text/event-stream"
# A replica may be silent for a multiple of the longest gap between its beats lately, within these
# bounds. The lower one leaves time for a packet that is lost and sent again twice.
MIN_SILENT_S = 0.6
_MULTIPLE = 3.0
# Gaps are kept as the longest of each second, for so many seconds.
_NUM_SECONDS, _MIN_SECONDS = 30, 3
# After a connection has ended, and where a server has no beats, it is asked again so much later.
_AGAIN_S, _WITHOUT_S = 2.0, 30.0
_MAX_EVENT_BYTES = 1 << 16
# A connection without a byte for so long is given up: a machine that is gone does not close it, and
# the server that takes its place would be judged by it.
LOST_S = 10.0


class BeatHealth(msgspec.Struct):
    """What a server says of itself where that changes."""

    ok: bool
    state: str
    reason: str = ""


_read_health = msgspec.json.Decoder(BeatHealth).decode


class Beats:
    """on_health: called with what the server says when its health changes. last_s: when the newest
    beat was read; 0 where none come."""

    def __init__(self, on_health: Callable[[BeatHealth], None]) -> None:
        self.last_s = 0.0
        self._on_health = on_health
        self._longest_s: deque[float] = deque(maxlen=_NUM_SECONDS)
        self._second = 0

    async def follow(self, pool: ConnectionPool, headers: Headers) -> bool:
        """Read beats until the connection ends; return whether the server has any. Raises
        ReplicaFault where it broke."""
        exchange = await pool.send(b"GET", PATH, headers, b"", is_fresh=True)
        try:
            async with _in_time():
                await exchange.head()
            if exchange.status != 200 or _EVENTS not in dict(exchange.headers).get(_TYPE, b""):
                return False
            await self._read(exchange)
            return True
        finally:
            self.last_s = 0.0
            self._longest_s.clear()
            exchange.close()

    async def _read(self, exchange: Exchange) -> None:
        rest = b""
        while True:
            async with _in_time():
                received = await exchange.read()
            if not received:
                return
            self._note(exchange.last_s)
            *events, rest = (rest + received).split(b"\n\n")
            if len(rest) > _MAX_EVENT_BYTES:
                raise ReplicaFault("its /health/beats are no events", is_suspect=False)
            for event in events:
                if event.startswith(b"data: "):
                    self._on_health(_read_health(event[6:]))

    def _note(self, now_s: float) -> None:
        gap_s = now_s - self.last_s if self.last_s else 0.0
        if int(now_s) != self._second or not self._longest_s:
            self._second = int(now_s)
            self._longest_s.append(gap_s)
        else:
            self._longest_s[-1] = max(self._longest_s[-1], gap_s)
        self.last_s = now_s

    def limit_s(self, at_most_s: float) -> float:
        """Return for how long a replica that works may send no beat."""
        if len(self._longest_s) < _MIN_SECONDS:
            return at_most_s
        return min(max(_MULTIPLE * max(self._longest_s), MIN_SILENT_S), at_most_s)


class FleetBeats:
    """The beats of all replicas of a fleet. headers: of requests to replicas. on_health: called
    with a replica and what it says."""

    def __init__(
        self, fleet: Fleet, headers: Headers, on_health: Callable[[Replica, BeatHealth], None]
    ) -> None:
        self._fleet = fleet
        self._headers = headers
        self._on_health = on_health
        self._loop = asyncio.get_running_loop()
        self._known: dict[Replica, Beats] = {}
        self._reading: dict[Replica, asyncio.Task[None]] = {}
        self._again_s: dict[Replica, float] = {}  # when it may be asked again

    def follow(self, replica: Replica) -> None:
        """Read the beats of a replica from now on. Twice is once."""
        if replica in self._reading or self._loop.time() < self._again_s.get(replica, 0.0):
            return
        beats = Beats(lambda health: self._on_health(replica, health))
        self._known[replica] = beats
        self._reading[replica] = asyncio.ensure_future(self._read(replica, beats))

    async def _read(self, replica: Replica, beats: Beats) -> None:
        host = replica.url.shown.partition("//")[2].encode()
        wait_s = _AGAIN_S
        try:
            pool = self._fleet.pool(replica)
            if not await beats.follow(pool, [(b"host", host), *self._headers]):
                wait_s = _WITHOUT_S
        except (ReplicaFault, msgspec.MsgspecError):
            self._fleet.probe_now.set()
        finally:
            self._reading.pop(replica, None)
            if replica in self._known:
                self._again_s[replica] = self._loop.time() + wait_s

    def quiet_s(self, replica: Replica, now_s: float) -> float | None:
        """Return the time since the newest beat; None where none come."""
        beats = self._known.get(replica)
        return None if beats is None or not beats.last_s else now_s - beats.last_s

    def limit_s(self, replica: Replica, at_most_s: float) -> float:
        """Return for how long a replica that works may send no beat. Over TLS the event loop of the
        server writes them, beside all its streams: they stop no sooner than its other answers."""
        return at_most_s if replica.url.is_secure else self._known[replica].limit_s(at_most_s)

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget replicas that are not among these."""
        for replica in self._known.keys() - set(replicas):
            del self._known[replica]
            self._again_s.pop(replica, None)
            if (task := self._reading.get(replica)) is not None:
                task.cancel()

    async def close(self) -> None:
        """Read no more."""
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(LOST_S):
            yield
    except TimeoutError:
        what = f"its /health/beats sent nothing for {LOST_S:g} s"
        raise ReplicaFault(what, is_suspect=False) from None
