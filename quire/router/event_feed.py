"""EventFeed: the KV events of all replicas, over ZeroMQ, which no other file of the router imports.

Each engine of a replica publishes apart. A thread of its own receives, orders (event_order.py) and
decodes; changes are applied in the event loop, some at a time, so that streams go on meanwhile.
Always holds: what waits for the loop is bounded, and events that are lost for that are a gap like
any other.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from quire.base.log import Log
from quire.router.event_order import CLEARED, Change, EventOrder

# Hashes that the loop takes at a time, and changes that may wait for it.
_HASHES_AT_ONCE = 1000
_MAX_WAITING = 64
_MAX_FRAME_BYTES = 16 << 20
_HIGH_WATER = 100_000
# Two for each engine.
_MAX_SOCKETS = 16_384
# So often replicas are asked whether their last events were lost.
_CHECK_S = 5.0
_END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")


class EngineName(NamedTuple):
    """An engine of a replica, by its name and the engine's number."""

    replica: str
    number: int


Apply = Callable[[EngineName, Sequence[Change]], None]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where an engine publishes. replay: "" where lost events cannot be asked for. is_checked:
    whether its batches must have its number, since the next ports are those of others."""

    events: str
    replay: str = ""
    is_checked: bool = False


@dataclass(slots=True, eq=False)
class _Publisher:
    """One engine: its sockets and what was received."""

    name: EngineName
    order: EventOrder
    events: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    problems: set[str] = field(default_factory=set)


class EventFeed:
    """apply: called in `loop` with an engine's name and its changes, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, apply: Apply, log: Log) -> None:
        self._loop = loop
        self._apply = apply
        self._log = log
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._orders: queue.SimpleQueue[tuple[EngineName, Endpoints | None]] = queue.SimpleQueue()
        self._publishers: dict[EngineName, _Publisher] = {}
        self._is_ending = False
        address = f"inproc://event-feed-{id(self)}"
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(address)
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.connect(address)
        self._thread = threading.Thread(target=self._run, name="quire-event-feed", daemon=True)
        self._thread.start()

    def follow(self, name: EngineName, endpoints: Endpoints) -> None:
        """Follow an engine, from its first event on; one that is followed begins anew."""
        self._orders.put((name, endpoints))
        self._wake_thread()

    def leave(self, name: EngineName) -> None:
        """Follow an engine no more."""
        self._orders.put((name, None))
        self._wake_thread()

    @property
    def num_gaps(self) -> int:
        """Gaps that were found so far in the events of the engines that are followed."""
        return sum(one.order.num_gaps for one in list(self._publishers.values()))

    @property
    def num_invalid(self) -> int:
        """Batches of them that could not be read."""
        return sum(one.order.num_invalid for one in list(self._publishers.values()))

    def close(self) -> None:
        """End the thread."""
        self._is_ending = True
        self._wake_thread()
        self._thread.join()
        self._context.destroy(linger=0)

    def _wake_thread(self) -> None:
        with suppress(zmq.Again):  # so many are waiting that it wakes anyway, or it has ended
            self._wake.send(b"", zmq.NOBLOCK)

    # ---- in the thread

    def _run(self) -> None:
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001  requests are routed without events
            self._log.error("KV events are no longer followed", reason=repr(error))
            for name in list(self._publishers):
                self._hand_over(name, [CLEARED])

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        checked_s = time.monotonic()
        while not self._is_ending:
            ready = dict(poller.poll(round(1000 * _CHECK_S)))
            if self._woken in ready:
                self._woken.recv()
                self._obey(poller)
            for publisher in list(self._publishers.values()):
                if publisher.replay in ready:
                    self._read_replay(publisher)
                if publisher.events in ready:
                    self._read_events(publisher)
            if time.monotonic() - checked_s > _CHECK_S:
                checked_s = time.monotonic()
                for publisher in self._publishers.values():
                    self._ask(publisher, publisher.order.check())

    def _obey(self, poller: zmq.Poller) -> None:
        """Follow and leave what was asked for."""
        while not self._orders.empty():
            name, endpoints = self._orders.get()
            old = self._publishers.pop(name, None)
            if old is not None:
                for socket in (old.events, old.replay):
                    if socket is not None:
                        poller.unregister(socket)
                        socket.close(linger=0)
            if endpoints is None:
                continue
            try:
                self._begin(name, endpoints, poller)
            except zmq.ZMQError as error:
                where = f"{endpoints.events} {endpoints.replay}".strip()
                self._log.warning(
                    "KV events cannot be followed",
                    replica=name.replica,
                    engine=name.number,
                    where=where,
                    reason=str(error),
                )

    def _begin(self, name: EngineName, endpoints: Endpoints, poller: zmq.Poller) -> None:
        events = self._socket(zmq.SUB, endpoints.events)
        events.subscribe(b"")
        replay = self._socket(zmq.DEALER, endpoints.replay) if endpoints.replay else None
        engine = name.number if endpoints.is_checked else None
        order = EventOrder(can_replay=replay is not None, engine=engine)
        publisher = self._publishers[name] = _Publisher(name, order, events, replay)
        for socket in (events, replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        self._act(publisher, *order.begin())

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
        return socket

    def _read_events(self, publisher: _Publisher) -> None:
        for _ in range(_MAX_WAITING):
            try:
                frames = publisher.events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                number = int.from_bytes(frames[1], "big")
                self._act(publisher, *publisher.order.live(number, frames[2]))
            else:
                self._complain(publisher, "what it publishes is no batch of events")

    def _read_replay(self, publisher: _Publisher) -> None:
        assert publisher.replay is not None
        for _ in range(_MAX_WAITING):
            try:
                frames = publisher.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or len(frames[1]) != 8:
                self._complain(publisher, "its replay is no batch of events")
            elif frames[1] == _END_OF_REPLAY:
                self._act(publisher, *publisher.order.replay_ended())
            else:
                number = int.from_bytes(frames[1], "big")
                self._act(publisher, publisher.order.replayed(number, frames[2]), None)

    def _act(self, publisher: _Publisher, changes: Sequence[Change], ask: int | None) -> None:
        """Hand changes to the loop, and ask for a replay."""
        if (other := publisher.order.other_engine) is not None:
            self._complain(
                publisher,
                f"what it publishes is of engine {other}: check data-parallel-size and the ports",
            )
        waiting, num_hashes = list[Change](), 0
        for change in changes:
            for at in range(0, max(len(change.hashes), 1), _HASHES_AT_ONCE):
                piece = Change(change.hashes[at : at + _HASHES_AT_ONCE], change.block_size)
                waiting.append(piece)
                num_hashes += len(piece.hashes)
                if num_hashes >= _HASHES_AT_ONCE:
                    self._hand_over(publisher.name, waiting)
                    waiting, num_hashes = [], 0
        if waiting:
            self._hand_over(publisher.name, waiting)
        self._ask(publisher, ask)

    def _ask(self, publisher: _Publisher, first: int | None) -> None:
        if first is None or publisher.replay is None:
            return
        try:
            publisher.replay.send_multipart((b"", first.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.Again:
            self._complain(publisher, "it takes no request for a replay")

    def _hand_over(self, name: EngineName, changes: list[Change]) -> None:
        while not self._room.acquire(timeout=1.0):
            if self._is_ending:
                return
        try:
            self._loop.call_soon_threadsafe(self._apply_one, name, changes)
        except RuntimeError:  # the loop has ended
            self._is_ending = True

    def _complain(self, publisher: _Publisher, what: str) -> None:
        """Log a problem of an engine once."""
        if what not in publisher.problems:
            publisher.problems.add(what)
            replica, engine = publisher.name
            self._log.warning("KV events of a replica", replica=replica, engine=engine, reason=what)

    # ---- in the loop

    def _apply_one(self, name: EngineName, changes: list[Change]) -> None:
        self._room.release()
        self._apply(name, changes)
