"""The channel between client and engine process: two one-way sockets, msgpack frames, no pickle.

ZeroMQ over ipc, in a folder only this user can enter. The client binds, the engine connects and
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

from quire.base.wire import Wire
from quire.engine.messages import (
    Abort,
    AskCache,
    Beat,
    CacheTold,
    Failed,
    FromEngine,
    Hello,
    Hold,
    Loading,
    Outputs,
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
)

_LINGER_MS = 1000
_RECONNECT_MS = 5


def to_engine_wire() -> Wire:
    """What a client may say."""
    return Wire(Submit, Abort, Hold, AskCache, Stop)


def from_engine_wire() -> Wire:
    """What an engine may say."""
    return Wire(Hello, Loading, Ready, Outputs, Beat, Refused, CacheTold, Failed)


class EngineSide:
    """The engine's end: an inbox for one thread, and `emit` for any."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = open_socket(self._context, zmq.PULL)
        self._in.connect(socket_address(folder, "in"))
        self._out = open_socket(self._context, zmq.PUSH)
        self._out.connect(socket_address(folder, "out"))
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        for source in (self._in, self._woken):
            self._poller.register(source, zmq.POLLIN)
        self._sending = threading.Lock()  # the loop and the heartbeat both do
        self._read, self._written = to_engine_wire(), from_engine_wire()

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All messages that came; waits at most `wait_s` for the first (None: for ever)."""
        if wait_s != 0.0:
            self._poller.poll(None if wait_s is None else math.ceil(wait_s * 1000))
            with suppress(BlockingIOError):
                os.eventfd_read(self._woken)
        return [self._read.decode(frame) for frame in received_frames(self._in)]

    def wake(self) -> None:
        """End a wait now, or the next; from any thread."""
        os.eventfd_write(self._woken, 1)

    def emit(self, message: FromEngine) -> None:
        """Queue a message to the client."""
        with self._sending:
            self._out.send(self._written.encode(message), copy=False)

    def close(self) -> None:
        """Give what is queued a second to leave."""
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._woken)


def received_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """All frames that have come; does not wait."""
    frames = []
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket without limits on its queues that finds its other end within milliseconds."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    return socket


def socket_address(folder: Path, name: str) -> str:
    """Where one of the two sockets lies; the names are the engine's: "in" and "out"."""
    return f"ipc://{folder}/{name}"
