"""The channel between client and engine process: two one-way sockets, msgpack frames, no pickle.

ZeroMQ over ipc, in a folder only this user can enter. The client binds, the engine connects and
keeps trying until the client is there, so neither waits for the other's imports. Queues are
unbounded: what is under way is bounded by the requests that were taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from quire.base.wire import Wire
from quire.engine.launch import EngineProcess
from quire.engine.messages import (
    Abort,
    Failed,
    FromEngine,
    Hello,
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
_END_S = 5.0


def _to_engine() -> Wire:
    return Wire(Submit, Abort, Stop)


def _from_engine() -> Wire:
    return Wire(Hello, Loading, Ready, Outputs, Refused, Failed)


class EngineSide:
    """The engine's end: an inbox, and `emit`. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = _socket(self._context, zmq.PULL)
        self._in.connect(_address(folder, "in"))
        self._out = _socket(self._context, zmq.PUSH)
        self._out.connect(_address(folder, "out"))
        self._read, self._written = _to_engine(), _from_engine()

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """All messages that came; waits at most `wait_s` for the first (None: for ever)."""
        if wait_s != 0.0:
            self._in.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        return [self._read.decode(frame) for frame in _frames(self._in)]

    def emit(self, message: FromEngine) -> None:
        """Queue a message to the client."""
        self._out.send(self._written.encode(message), copy=False)

    def close(self) -> None:
        """Give what is queued a second to leave."""
        self._context.destroy(linger=_LINGER_MS)


class ProcessLink:
    """The client's end, in an event loop: messages and the process's end come as calls."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._context = zmq.Context(io_threads=1)
        self._out = _socket(self._context, zmq.PUSH)
        self._out.bind(_address(process.folder, "in"))
        self._in = _socket(self._context, zmq.PULL)
        self._in.bind(_address(process.folder, "out"))
        self._written, self._read = _to_engine(), _from_engine()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        self._watcher: threading.Thread | None = None

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Call `on_message` for each message, and once `on_end` when the process has ended."""
        self._loop, self._on_message = loop, on_message
        loop.add_reader(_descriptor(self._in), self._receive)
        self._receive()

        def ended(exit_code: int | None) -> None:
            if self._loop is not None:
                self._receive()  # its last words come first
                on_end(_exit_text(exit_code))

        def watch() -> None:
            exit_code = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(ended, exit_code)

        self._watcher = threading.Thread(target=watch, name="quire-engine-watch", daemon=True)
        self._watcher.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine; dropped where it is gone, which `on_end` tells."""
        self._sent(message)

    async def close(self) -> None:
        """Ask the engine to stop, make sure that it does, and free the sockets."""
        loop = asyncio.get_running_loop()
        if self._loop is not None:
            self._loop.remove_reader(_descriptor(self._in))
            self._loop = None
        wait_s = _END_S if self._sent(Stop()) else 0.0
        await loop.run_in_executor(None, self._end, wait_s)

    def _sent(self, message: ToEngine) -> bool:
        try:
            self._out.send(self._written.encode(message), zmq.NOBLOCK, copy=False)
        except zmq.Again:  # nobody is connected: not yet, or no more
            return False
        return True

    def _end(self, wait_s: float) -> None:
        self._process.wait(wait_s)
        self._process.end(0.0)
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        # The socket's descriptor tells changes only, so each call reads until nothing is left.
        on_message = self._on_message
        assert on_message is not None, "open() comes before the first message"
        for frame in _frames(self._in):
            on_message(self._read.decode(frame))


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames = []
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    return socket


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the engine process was ended by signal {-exit_code}"
    return f"the engine process ended with exit code {exit_code}"
