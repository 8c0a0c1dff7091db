"""TlsListener: accepts TLS connections, with a bound on handshakes and on the time of each.

asyncio's own TLS server reports a connection only after its handshake, so stalled handshakes
could be neither counted nor closed. A client that begins with a letter speaks plain HTTP and is
refused in plain text. Always holds: a handshake takes at most HANDSHAKE_TIME_S; a failing accept
does not end the listener.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from quire.api.http.connection import OPEN_CONNECTIONS, ConnectionState

HANDSHAKE_TIME_S = 10.0
_MAX_ACCEPTS = 64  # in one iteration of the event loop
_MIN_HANDSHAKE_S = 0.001
_MAX_REFUSED_BYTES = 64 * 1024
# Pause of accepting after an accept failed for lack of descriptors or memory.
_RETRY_S = 0.1


class TlsListener:
    """Serve TLS at a listening socket, with the part of asyncio.Server that uvicorn uses.

    refusal: the response to plain HTTP.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        refusal: bytes,
    ) -> None:
        self._listening = listening
        self._context = context
        self._make_protocol = make_protocol
        self._refusal = refusal
        self._handshakes: set[_Handshake] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._fd = listening.fileno()
        self._listening.setblocking(False)
        self._loop.add_reader(self._fd, self._accept)

    def close(self) -> None:
        """Stop accepting connections and end unfinished handshakes."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._fd)
        for handshake in list(self._handshakes):
            handshake.evict()

    async def wait_closed(self) -> None:
        """Return at once: nothing of the listener is left once it is closed."""

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._fd)
                self._retry = self._loop.call_later(_RETRY_S, self._resume)
                return
            handshake = _Handshake(accepted, self._refusal, self._handshakes.discard)
            self._handshakes.add(handshake)
            handshake.begin(self._context, self._make_protocol)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._fd, self._accept)


class _Handshake:
    """An accepted socket, until its handshake has been done or has failed."""

    def __init__(
        self, accepted: socket.socket, refusal: bytes, on_end: Callable[[_Handshake], None]
    ) -> None:
        self._socket = accepted
        self._refusal = refusal
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._is_served = False

    def begin(self, context: ssl.SSLContext, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Start the handshake; `make_protocol` makes what serves the connection after it."""
        self._socket.setblocking(False)
        with suppress(OSError):  # a Unix socket, or the client has already disconnected
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._task = asyncio.ensure_future(self._run(context, make_protocol))
        self._task.add_done_callback(self._end)
        OPEN_CONNECTIONS.add(self, ConnectionState.HANDSHAKE)

    def evict(self) -> None:
        """End the handshake; its client sees the connection closed."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._task is not None:
            self._task.cancel()

    async def _run(
        self, context: ssl.SSLContext, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + HANDSHAKE_TIME_S
        with suppress(OSError):  # no TLS, too late, or gone
            async with asyncio.timeout_at(ends_s):
                first = await self._first_byte(loop)
            if first.isalpha():
                self._refuse()
                return
            left_s = max(ends_s - loop.time(), _MIN_HANDSHAKE_S)
            await loop.connect_accepted_socket(
                make_protocol, self._socket, ssl=context, ssl_handshake_timeout=left_s
            )
            self._is_served = True

    def _end(self, _: asyncio.Task[None]) -> None:
        # Not within the task: one that is evicted as it is accepted ends before its first line.
        if not self._is_served:
            self._socket.close()
        OPEN_CONNECTIONS.remove(self)
        self._on_end(self)

    async def _first_byte(self, loop: asyncio.AbstractEventLoop) -> bytes:
        """Return the first byte that the client sends, which is left to be read."""
        readable, fd = asyncio.Event(), self._socket.fileno()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)
        return self._socket.recv(1, socket.MSG_PEEK)

    def _refuse(self) -> None:
        """Answer a request in plain text. What is not read of it may cut the answer off."""
        self._socket.recv(_MAX_REFUSED_BYTES)
        self._socket.send(self._refusal)
        self._socket.shutdown(socket.SHUT_WR)
