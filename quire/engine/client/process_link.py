"""ProcessLink: an engine process, seen from an event loop: messages and its end come as calls.

The client's end of channel.py's sockets, to an engine of ours or one that we share. Always holds:
sending never blocks, whether the engine is there or not; the reason of a failure is delivered
before the process's end, also where its message was lost on the socket; close() leaves no process
of ours, no socket and no folder behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import zmq

from quire.base.errors import WorkerError
from quire.base.log import Log
from quire.engine.client.launch import EngineProcess, SharedEngine
from quire.engine.process.channel import (
    from_engine_wire,
    open_socket,
    received_frames,
    socket_address,
    to_engine_wire,
)
from quire.engine.process.messages import FromEngine, Stop, ToEngine

_END_S = 5.0
# How often it is checked whether an engine that has connected one socket has connected both.
_CONNECT_S = 0.002


class ProcessLink:
    """The client's end, in an event loop: messages and the process's end come as calls.

    Raises WorkerError where its sockets cannot be opened; the process goes on."""

    def __init__(self, process: EngineProcess | SharedEngine) -> None:
        self._process = process
        self._context = zmq.Context(io_threads=1)
        try:
            self._out = open_socket(self._context, zmq.PUSH)
            self._out.bind(socket_address(process.folder, "in", process.client))
            self._in = open_socket(self._context, zmq.PULL)
            self._in.bind(socket_address(process.folder, "out", process.client))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise WorkerError(
                f"the sockets of the engine process cannot be opened in {process.folder}: {error}; "
                "something may have removed the directory (set TMPDIR to another one), or this "
                "process may open too few files (ulimit -n)"
            ) from error
        self._written, self._read = to_engine_wire(), from_engine_wire()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[FromEngine], None] | None = None
        self._watcher: threading.Thread | None = None
        self._is_connected = False

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
                self._is_connected = True  # what is there is received in any case
                self._receive()
                # A message under way in ZeroMQ's thread, or sent before this side was bound, is
                # not received here. The failure report is there as soon as the process has ended.
                failure = self._process.failure()
                if failure:
                    on_message(self._read.decode(failure))
                on_end(_exit_text(exit_code))

        def watch() -> None:
            exit_code = self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: no listeners are left
                loop.call_soon_threadsafe(ended, exit_code)

        self._watcher = threading.Thread(target=watch, name="quire-engine-watch", daemon=True)
        self._watcher.start()

    def send(self, message: ToEngine) -> bool:
        """Queue a message; return False if the engine has not started or has ended."""
        try:
            self._out.send(self._written.encode(message), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """Ask the engine to stop, make sure that it does, and free the sockets. One that we share
        goes on."""
        loop = asyncio.get_running_loop()
        if self._loop is not None:
            self._loop.remove_reader(_descriptor(self._in))
            self._loop = None
        wait_s = _END_S if self._process.is_ours and self.send(Stop()) else 0.0
        await loop.run_in_executor(None, self._end, wait_s)

    def _end(self, wait_s: float) -> None:
        if wait_s and self._process.wait(wait_s) is None:
            Log("engine").error("the engine process is killed: it has not ended", waited_s=wait_s)
        self._process.end(0.0)
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        # The socket's descriptor is edge-triggered, so each call reads until the socket is empty.
        on_message, loop = self._on_message, self._loop
        assert on_message is not None, "open() comes before the first message"
        if loop is None:
            return
        # An engine that says that it is ready is sent requests at once.
        self._is_connected = self._is_connected or bool(self._out.poll(0, zmq.POLLOUT))
        if not self._is_connected:
            if self._in.poll(0, zmq.POLLIN):
                loop.call_later(_CONNECT_S, self._receive)
            return
        for frame in received_frames(self._in):
            on_message(self._read.decode(frame))


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _exit_text(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the engine process was ended by signal {-exit_code}"
    return f"the engine process ended with exit code {exit_code}"
