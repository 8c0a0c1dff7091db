"""Beats: the signs of life of one replica, on a connection of their own (GET /health/beats).

A thread of the server writes them, beside its event loop and its engine: a long step, a long prompt
or a thousand streams do not hold them up, so they stop only where the process stops, or the
network. Events between them say at once when the health changes, as where an engine has died. Reads
no clock but the connection's. Always holds: a replica without beats is judged by its answers alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

import msgspec

from quire.router.faults import ReplicaFault
from quire.router.fleet import Fleet
from quire.router.http_client import ConnectionPool, Exchange, Headers
from quire.router.replica import Replica
from quire.routing.beat_gaps import AwakeTime, BeatGaps

Connect = Callable[[], Awaitable[Exchange]]

PATH = b"/health/beats"
_TYPE, _EVENTS = b"content-type", b"text/event-stream"
# Beats are late after half of what is usual; of that, while little is known.
_LATE_S = 2.0
_GLANCE_S = 0.1
# Interval of the check for lateness of this process.
_TICK_S = 0.05
# A connection beside the silent one that fails, or has no head for so long, is opened anew after
# the first of these times, which doubles up to the second.
_OTHER_AGAIN_S, _MAX_OTHER_AGAIN_S = 0.25, 2.0
_OTHER_S = 2.0
# After a connection has ended, and where a server has no beats, it is asked again so much later.
_AGAIN_S, _WITHOUT_S = 2.0, 30.0
_MAX_EVENT_BYTES = 1 << 16
# A connection without a byte for so long is given up: a machine that is gone does not close it, and
# the server that takes its place would be judged by it.
LOST_S = 10.0


class BeatHealth(msgspec.Struct):
    """What a server says of itself where that changes. silent_ms: of an engine process that has
    sent nothing for several times as long as usual; 0 else."""

    ok: bool
    state: str
    reason: str = ""
    stopped_processes: tuple[int, ...] = ()
    silent_ms: float = 0.0


_read_health = msgspec.json.Decoder(BeatHealth).decode


class Beats:
    """on_health: called with what the server says when its health changes. time: of this process.
    gaps: between beats, in that time; its last_s is 0 where none come."""

    def __init__(self, on_health: Callable[[BeatHealth], None], time: AwakeTime) -> None:
        self.gaps = BeatGaps()
        self._time = time
        self._on_health = on_health
        self._exchange: Exchange | None = None
        self._other: asyncio.Task[Exchange] | None = None
        self._other_at_s, self._other_wait_s = 0.0, _OTHER_AGAIN_S
        self._loop = asyncio.get_running_loop()

    async def follow(self, connect: Connect) -> bool:
        """Read beats until the connection ends; return whether the server has any. Raises
        ReplicaFault where it broke.

        connect: opens a connection. While beats are late, another one is opened beside: of several
        API processes behind one port another one may take it, and says which have stopped.
        """
        try:
            self._exchange = await connect()
            if not _has_beats(self._exchange):
                return False
            await self._read(connect)
            return True
        finally:
            self.gaps.clear()
            self._leave_other()
            if self._exchange is not None:
                self._exchange.close()

    async def _read(self, connect: Connect) -> None:
        rest = b""
        while True:
            assert self._exchange is not None, "it is open"
            received = await self._received(self._exchange)
            if received is None:
                rest = b"" if self._is_replaced(self._exchange, connect) else rest
                continue
            if not received:
                return
            self._leave_other()
            self._other_at_s, self._other_wait_s = 0.0, _OTHER_AGAIN_S
            self.gaps.note(self._time.of(self._exchange.last_s))
            *events, rest = (rest + received).split(b"\n\n")
            if len(rest) > _MAX_EVENT_BYTES:
                raise ReplicaFault("its /health/beats are no events", is_suspect=False)
            for event in events:
                if event.startswith(b"data: "):
                    self._on_health(_read_health(event[6:]))

    async def _received(self, exchange: Exchange) -> bytes | None:
        """Return what comes within a moment; None for nothing."""
        try:
            async with asyncio.timeout(_GLANCE_S):
                return await exchange.read()
        except TimeoutError:
            return None

    def _is_replaced(self, exchange: Exchange, connect: Connect) -> bool:
        """Return whether another connection is read from now on. Raises ReplicaFault where it was
        waited for too long."""
        now_s = self._loop.time()
        silent_s = now_s - exchange.last_s
        if silent_s > LOST_S:
            raise _lost()
        if self._other is None:
            if silent_s > self.gaps.limit_s(_LATE_S) / 2 and now_s >= self._other_at_s:
                self._other = asyncio.ensure_future(connect())
                self._other_at_s = now_s + _OTHER_S
            return False
        other = self._other
        if other.done() and not other.exception() and _has_beats(other.result()):
            exchange.close()
            self._exchange, self._other = other.result(), None
            return True
        if other.done() or now_s >= self._other_at_s:
            self._leave_other()
            self._other_at_s = now_s + self._other_wait_s
            self._other_wait_s = min(2 * self._other_wait_s, _MAX_OTHER_AGAIN_S)
        return False

    def _leave_other(self) -> None:
        """Give up the connection that was opened beside this one."""
        other, self._other = self._other, None
        if other is None or other.cancel() or other.cancelled():
            return
        if other.exception() is None:
            other.result().close()


class FleetBeats:
    """The beats of all replicas of a fleet. on_health: called with a replica and what it says."""

    def __init__(self, fleet: Fleet, on_health: Callable[[Replica, BeatHealth], None]) -> None:
        self._fleet = fleet
        self._on_health = on_health
        self._loop = asyncio.get_running_loop()
        self._time = AwakeTime()
        self._timer: asyncio.TimerHandle | None = None
        self._known: dict[Replica, Beats] = {}
        self._reading: dict[Replica, asyncio.Task[None]] = {}
        self._again_s: dict[Replica, float] = {}  # when it may be asked again
        self._stopped: dict[Replica, tuple[int, ...]] = {}  # processes, by the newest event

    def follow(self, replica: Replica) -> None:
        """Read the beats of a replica from now on. Twice is once."""
        if replica in self._reading or self._loop.time() < self._again_s.get(replica, 0.0):
            return
        if self._timer is None:
            self._tick(self._loop.time())
        beats = Beats(partial(self._hear, replica), self._time)
        self._known[replica] = beats
        self._reading[replica] = asyncio.ensure_future(self._read(replica, beats))

    def _tick(self, planned_s: float) -> None:
        now_s = self._loop.time()
        self._time.tick(planned_s, now_s)
        self._timer = self._loop.call_at(now_s + _TICK_S, self._tick, now_s + _TICK_S)

    async def _read(self, replica: Replica, beats: Beats) -> None:
        fleet, wait_s = self._fleet, _AGAIN_S
        try:
            headers = fleet.own_headers(replica)
            if not await beats.follow(partial(_connect, fleet.pool(replica), headers)):
                wait_s = _WITHOUT_S
        except (ReplicaFault, msgspec.MsgspecError):
            fleet.probe_now.set()
        finally:
            self._reading.pop(replica, None)
            self._stopped.pop(replica, None)
            if replica in self._known:
                self._again_s[replica] = self._loop.time() + wait_s

    def _hear(self, replica: Replica, health: BeatHealth) -> None:
        """Give up what is open at processes that have stopped; streams continue elsewhere."""
        before = self._stopped.get(replica, ())
        self._stopped[replica] = health.stopped_processes
        if stopped := [one for one in health.stopped_processes if one not in before]:
            what = "API processes of a replica have stopped"
            numbers = ",".join(map(str, stopped))
            self._fleet.log.warning(what, replica=replica.name, processes=numbers)
            self._fleet.pool(replica).lose([b"%d" % number for number in stopped])
        self._on_health(replica, health)

    def quiet_s(self, replica: Replica, now_s: float) -> float | None:
        """Return the time since the newest beat, in which this process could read one; None where
        none come."""
        beats = self._known.get(replica)
        if beats is None or not beats.gaps.last_s:
            return None
        return self._time.of(now_s) - beats.gaps.last_s

    def limit_s(self, replica: Replica, at_most_s: float) -> float:
        """Return for how long a replica that works may send no beat. Over TLS the event loop of the
        server writes them, beside all its streams: they stop no sooner than its other answers. Of
        one that has just returned little is known: the limits of the others count."""
        if replica.url.is_secure:
            return at_most_s
        others = (beats.gaps for one, beats in self._known.items() if one is not replica)
        return self._known[replica].gaps.limit_s(at_most_s, others)

    def has_stopped(self, replica: Replica) -> None:
        """Note that a replica was given up as stopped: what it is silent for is no usual gap."""
        if (beats := self._known.get(replica)) is not None:
            beats.gaps.has_stopped()

    def keep(self, replicas: Collection[Replica]) -> None:
        """Forget replicas that are not among these."""
        for replica in self._known.keys() - set(replicas):
            del self._known[replica]
            self._again_s.pop(replica, None)
            if (task := self._reading.get(replica)) is not None:
                task.cancel()

    async def close(self) -> None:
        """Read no more."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._reading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _connect(pool: ConnectionPool, headers: Headers) -> Exchange:
    """Return a new connection to the beats, once its head is there. Raises ReplicaFault."""
    exchange = await pool.send(b"GET", PATH, headers, b"", is_fresh=True)
    try:
        async with asyncio.timeout(LOST_S):
            await exchange.head()
    except BaseException as error:
        exchange.close()
        if isinstance(error, TimeoutError):
            raise _lost() from None
        raise
    return exchange


def _has_beats(exchange: Exchange) -> bool:
    return exchange.status == 200 and _EVENTS in dict(exchange.headers).get(_TYPE, b"")


def _lost() -> ReplicaFault:
    return ReplicaFault(f"its /health/beats sent nothing for {LOST_S:g} s", is_suspect=False)
