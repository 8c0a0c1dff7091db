"""The channel between clients and engine process: two one-way sockets each, msgpack, no pickle.

ZeroMQ over ipc, in a folder only this user can enter. A client binds, the engine connects and
keeps trying until the client is there, so neither waits for the other's imports. Queues are
unbounded: what is under way is bounded by the requests that were taken.
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import suppress
from pathlib import Path

import zmq

from quire.base.clock import Clock
from quire.base.wire import Wire
from quire.engine.process.message_routing import STARTER, id_prefix, parts
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Abort,
    Beat,
    CacheReported,
    Failed,
    FromEngine,
    Hello,
    Hold,
    HoldClient,
    Join,
    Leave,
    Loading,
    Outputs,
    QueryCache,
    QuerySnapshot,
    QueryTimelines,
    Ready,
    Refused,
    SnapshotReported,
    Stop,
    Submit,
    TimelinesReported,
    ToEngine,
)
from quire.engine.process.stopped_clients import StoppedClients

_LINGER_MS = 1000
_RECONNECT_MS = 5


def to_engine_wire() -> Wire:
    """Return what a client may say."""
    return Wire(Submit, Abort, Hold, QueryCache, QuerySnapshot, QueryTimelines, Join, Leave, Stop)


def from_engine_wire() -> Wire:
    """Return what an engine may say."""
    return Wire(
        *(
            Hello,
            Loading,
            Ready,
            Outputs,
            Beat,
            Refused,
            CacheReported,
            SnapshotReported,
            TimelinesReported,
            Failed,
        )
    )


class EngineSide:
    """The engine's end: an inbox for one thread, and `emit` for any.

    The process that started the engine, `starter_id`, is its one client, until it sends Join for
    others. The streams of a client that is stopped are paused.
    """

    def __init__(self, folder: Path, *, starter_id: int) -> None:
        self._folder = folder
        clock = Clock()
        self._stopped = StoppedClients(lambda: clock.now_ms() / 1000.0)
        self._stopped.add(STARTER, starter_id)
        self._context = zmq.Context(io_threads=1)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._sending = threading.Lock()  # the loop and the heartbeat both do
        self._read, self._written = to_engine_wire(), from_engine_wire()
        self._ready: Ready | None = None
        self._ends: dict[int, _ClientEnd] = {}
        self._open(STARTER)

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """Return the received messages; wait at most `wait_s` for the first (None: no limit)."""
        if wait_s != 0.0:
            self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))
            with suppress(BlockingIOError):
                os.eventfd_read(self._woken)
        came: list[ToEngine] = []
        for client in list(self._ends):
            end = self._ends.get(client)  # None: it left, as we read just now
            for frame in received_frames(end.source) if end is not None else ():
                message: ToEngine = self._read.decode(frame)
                if client == STARTER:
                    self._know(message)
                came.append(message)
        for client, is_stopped in self._stopped.changes():
            came.append(HoldClient(prefix=id_prefix(client), is_held=is_stopped))
        return came

    def wake(self) -> None:
        """End a wait now, or the next; from any thread."""
        os.eventfd_write(self._woken, 1)

    def emit(self, message: FromEngine) -> None:
        """Queue a message to the client, or to those it is for."""
        with self._sending:
            if isinstance(message, Ready):
                self._ready = message
            if len(self._ends) == 1:
                self._send(STARTER, message)
            else:
                for client, part in parts(message, self._ends):
                    self._send(client, part)

    def _send(self, client: int, message: FromEngine) -> None:
        end = self._ends.get(client)
        if end is not None:
            end.sink.send(self._written.encode(message), copy=False)

    def _know(self, message: ToEngine) -> None:
        """Track clients; send a new one the messages that the others received at the start."""
        if isinstance(message, Join):
            self._stopped.remove(STARTER)  # it has no streams
            self._stopped.add(message.client, message.process_id)
            with self._sending:
                self._open(message.client)
                hello = Hello(protocol_version=PROTOCOL_VERSION, process_id=os.getpid())
                self._send(message.client, hello)
                if self._ready is not None:
                    self._send(message.client, self._ready)
        elif isinstance(message, Leave):
            self._stopped.remove(message.client)
            with self._sending:
                end = self._ends.pop(message.client, None)
                if end is not None:
                    self._poller.unregister(end.source)
                    end.close()

    def _open(self, client: int) -> None:
        end = _ClientEnd(self._context, self._folder, client)
        self._poller.register(end.source, zmq.POLLIN)
        self._ends[client] = end

    def close(self) -> None:
        """Give what is queued a second to leave."""
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._woken)
        self._stopped.close()


class _ClientEnd:
    """The sockets to one client."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, client: int) -> None:
        self.source = open_socket(context, zmq.PULL)
        self.source.connect(socket_address(folder, "in", client))
        self.sink = open_socket(context, zmq.PUSH)
        self.sink.connect(socket_address(folder, "out", client))

    def close(self) -> None:
        """Close the sockets; the peer is gone."""
        self.source.close(linger=0)
        self.sink.close(linger=0)


def received_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return all frames that have come; does not wait."""
    frames = []
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a socket without limits on its queues that finds its other end within milliseconds."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    return socket


def socket_address(folder: Path, name: str, client: int = STARTER) -> str:
    """Where one of a client's two sockets lies; the names are the engine's: "in" and "out"."""
    return f"ipc://{folder}/{name}.{client}"
