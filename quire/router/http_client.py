"""An HTTP/1.1 client for replicas: kept connections, and bodies that are read as they arrive.

Over httptools (the parser of the server) and asyncio's transports. One `Exchange` is a request and
its response; it ends with its body, or with a ReplicaFault when the connection ends early, is cut,
or sends what is no HTTP. A reader that does not keep up pauses the connection, so the replica
notices. A connection without a path breaks within LOST_S. Knows no JSON and no policy.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import cast

import httptools

from quire.base.http_apis import PROCESS_HEADER
from quire.base.server_url import ServerUrl, reason_of
from quire.router.faults import (
    NoFiles,
    ProcessStopped,
    ReplicaFault,
    SlowClient,
    StaleConnection,
)
from quire.routing.beat_gaps import MIN_SILENT_S

Headers = list[tuple[bytes, bytes]]

_MAX_UNREAD_BYTES = 256 << 10
# A reader for which a connection was paused for longer is slow.
_SLOW_S = 1.0
# A body is read in pieces of about so much: other tasks go on between two of them.
READ_BYTES = 8 << 10
_MAX_HEAD_BYTES = 64 << 10
_END_OF_STATUSES = 600
_MAX_IDLE = 64
_NO_FILES = (errno.EMFILE, errno.ENFILE)
# A connection that was kept for less is not closed for its idleness: its end is a failure.
_STALE_AFTER_S = 1.0
# Of a turn of the loop, so much counts as time in which a server has not accepted a connection: a
# router that is busy with thousands of requests reads late what came in time.
_MAX_COUNTED_S = 0.1
# The kernel checks a connection without traffic after _CHECK_AFTER_S, which also keeps devices on
# the way (NAT) from forgetting it, and breaks one without an answer within LOST_S. TCP_USER_TIMEOUT
# says the same of a request that is not acknowledged, or not read. macOS has another name for the
# first, and not the last.
LOST_S, _CHECK_AFTER_S, _CHECK_EVERY_S = 30, 15, 5
_KEEPALIVE = {
    "TCP_KEEPIDLE": _CHECK_AFTER_S,
    "TCP_KEEPALIVE": _CHECK_AFTER_S,
    "TCP_KEEPINTVL": _CHECK_EVERY_S,
    "TCP_KEEPCNT": (LOST_S - _CHECK_AFTER_S) // _CHECK_EVERY_S,
    "TCP_USER_TIMEOUT": 1000 * LOST_S,
}


class Exchange:
    """One request and its response. status: 0 before there is one. last_s: when bytes came last.
    is_paused: nothing is read from the connection, because the reader does not keep up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, may_be_stale: bool) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_complete = self.is_paused = False
        self.last_s = loop.time()
        self._loop = loop
        self._may_be_stale = may_be_stale
        self._connection: _Connection | None = None
        self._pieces: deque[bytes] = deque()
        self._num_unread = 0
        self._has_rest = False
        self._paused_s = 0.0
        self._was_slow = False  # the reader: a server may have given it up
        self._failure: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._is_refused = False  # by what takes pieces, which needs to wait

    async def head(self) -> None:
        """Wait for status and headers. Raises ReplicaFault."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return what has arrived of the body, about READ_BYTES of it at most; b"" at its end.
        Raises ReplicaFault."""
        if self._has_rest:  # where much has come, each of many streams has its turn
            await asyncio.sleep(0)
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        return self._next()

    async def hand_over(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with what arrives of the body, at once, until it returns False; return False
        where the body ends before. Raises ReplicaFault, and what `take` raises.

        So a piece costs no turn of the event loop and wakes no task. Of much that comes at once,
        about READ_BYTES are taken in each turn, as `read` returns them.
        """
        while not self._is_refused:
            if self._has_rest:
                await asyncio.sleep(0)
            if self._pieces:
                self._is_refused = not take(self._next())
            elif self.is_complete:
                return False
            else:
                self._take = take
                try:
                    await self._wait()
                finally:
                    self._take = None
        self._is_refused = False
        return True

    def _next(self) -> bytes:
        """Return the next of the pieces."""
        pieces = self._pieces
        piece = pieces.popleft()
        if pieces:
            found, num_bytes = [piece], len(piece)
            while pieces and num_bytes < READ_BYTES:
                found.append(pieces.popleft())
                num_bytes += len(found[-1])
            piece = b"".join(found)
        self._has_rest = bool(pieces)
        self._num_unread -= len(piece)
        if self.is_paused and not pieces:
            self.is_paused = False
            self._was_slow |= self._loop.time() - self._paused_s > _SLOW_S
            if self._connection is not None:
                self._connection.resume()
        return piece

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error: no more comes than has arrived."""
        return self._failure is not None

    async def body(self) -> bytes:
        """Return the rest of the body."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def fail(self, error: Exception) -> None:
        """End the exchange with an error, unless it has ended."""
        if self.is_complete or self._failure is not None:
            return
        self._failure = error
        self._wake()
        self.close()

    def close(self) -> None:
        """Give up the connection unless the response is complete."""
        connection, self._connection = self._connection, None
        if connection is not None and not self.is_complete:
            connection.abort()

    def leave(self) -> None:
        """Read no more of a response that is whole but for the end of its body. Its connection is
        kept for a request that comes after that end."""
        connection, self._connection = self._connection, None
        self.is_complete = True
        if connection is not None:
            connection.leave(has_rest=bool(self._pieces) or self.is_paused)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None
        if self._failure is not None and not (self._pieces or self._is_refused):
            raise self._failure

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # ---- called by the connection

    def began(self, connection: _Connection) -> None:
        self._connection = connection

    def got_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def got(self, *body: bytes) -> bool:
        """Take pieces of the body; return whether to pause reading."""
        waiting, take = self._waiting, self._take
        if take is not None and len(body) == 1 and waiting is not None and not waiting.done():
            try:
                self._is_refused = not take(body[0])
            except Exception as error:  # noqa: BLE001 (of the task that waits)
                waiting.set_exception(error)
            if self._is_refused:
                self._wake()
            return False
        self._pieces.extend(body)
        self._num_unread += sum(map(len, body))
        self._wake()
        if self._num_unread > _MAX_UNREAD_BYTES and not self.is_paused:
            self.is_paused, self._paused_s = True, self._loop.time()
        return self.is_paused

    def completed(self) -> None:
        self.is_complete = True
        self._connection = None
        self._wake()

    def lost(self, why: str) -> None:
        """Note that the connection is gone."""
        self._connection = None
        if self.is_complete or self._failure is not None:
            return
        if self._may_be_stale and not self.status:
            self._failure = StaleConnection(why, is_suspect=False)
        elif self._was_slow:
            self._failure = SlowClient(why)
        else:
            self._failure = ReplicaFault(why, is_suspect=True)
        self._wake()


class _Connection(asyncio.Protocol):
    """One connection of a pool. process: of the server, that has accepted it; b"" while that is not
    known, or where a server has only one. is_ending: only the end of a body is to come before the
    next request. generation: of the pool when it began to be opened."""

    def __init__(self, pool: ConnectionPool, generation: int) -> None:
        self._pool = pool
        self.generation = generation
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._body: list[bytes] = []  # of what was received last
        self._keeps_alive = False
        self.kept_s = 0.0
        self.process = b""
        self.is_ending = False
        self._loop = asyncio.get_running_loop()

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_bytes, self._body = [], 0, []
        exchange.began(self)
        self._transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self._transport.write(body)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def leave(self, *, has_rest: bool) -> None:
        """Keep it without its exchange, unless more has come than the end of the body."""
        if has_rest:
            self.abort()
            return
        self._exchange, self.is_ending = None, True
        self._pool.keep(self)

    def abort(self) -> None:
        self._exchange, self.is_ending = None, False
        if self._transport is not None:
            self._transport.abort()

    def lose(self) -> None:
        """End it: the process at the other end has stopped."""
        exchange = self._exchange
        if exchange is None:
            self.abort()
        elif exchange.status:
            exchange.fail(ProcessStopped())
        else:  # it is sent again, and another process accepts it
            exchange.fail(StaleConnection("its process has stopped", is_suspect=False))

    @property
    def may_be_lost(self) -> bool:
        """Whether any process may have it, stopped ones too: it has no answer, and may be older
        than the stop, which was up to a usual gap after the last beat."""
        exchange = self._exchange
        return (
            exchange is not None
            and not (self.process or exchange.status)
            and self._loop.time() - exchange.last_s > MIN_SILENT_S / 2
        )

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, received: bytes) -> None:
        exchange, parser = self._exchange, self._parser
        if parser is None or (exchange is None and not self.is_ending):
            self.abort()  # a kept connection has nothing to say
            return
        if exchange is not None:
            exchange.last_s = self._loop.time()
        try:
            parser.feed_data(received)
            if self._body:
                self._pass_body()
            if exchange is not None and not exchange.status:
                self._head_bytes += len(received)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    raise httptools.HttpParserError("the head is too long")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._body:
                self._pass_body()
            self.abort()
            if exchange is not None:
                is_other = isinstance(error, httptools.HttpParserUpgrade)
                why = "another protocol" if is_other else error
                exchange.lost(f"the server sent what is no HTTP response ({why})")

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.dropped(self)
        exchange, self._exchange = self._exchange, None
        self._transport = None
        if exchange is not None:
            exchange.lost(
                "the server closed the connection before the response was complete"
                if error is None
                else f"the connection to the server broke ({reason_of(error)})"
            )

    # ---- the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._keeps_alive = self._parser.should_keep_alive()
        self.process = dict(self._headers).get(PROCESS_HEADER, b"")
        if self.process:
            self._pool.has_processes = True
        status = self._parser.get_status_code()
        if status >= _END_OF_STATUSES:
            raise httptools.HttpParserError(f"its status is {status}")
        if self._exchange is not None and status >= 200:
            self._exchange.got_head(status, self._headers)
        self._headers = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def _pass_body(self) -> None:
        """Give the exchange what has come of its body: as one piece, unless that is much."""
        body, self._body = self._body, []
        if len(body) > 1 and sum(map(len, body)) <= READ_BYTES:
            body = [b"".join(body)]
        exchange = self._exchange
        if exchange is None:
            self.abort()  # the body was to end
        elif exchange.got(*body) and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._body:
            self._pass_body()
        exchange = self._exchange
        if exchange is None and self.is_ending:
            self.is_ending = False
            if not self._keeps_alive:
                self.abort()
        if exchange is None or not exchange.status:
            return
        self._exchange = None
        if self._transport is not None and exchange.is_paused:
            self._transport.resume_reading()
        exchange.completed()
        if self._keeps_alive:
            self._pool.keep(self)
        else:
            self.abort()


class ConnectionPool:
    """Connections to one server. tls: what is trusted, in place of the system's authorities.
    has_processes: whether several processes of the server answer."""

    def __init__(
        self, url: ServerUrl, connect_s: float, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = url
        self._connect_s = connect_s
        self.has_processes = False
        self._tls = tls or (ssl.create_default_context() if url.is_secure else None)
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
        self._generation = 0  # how often the pool was closed

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        is_fresh: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Exchange:
        """Send a request. Raises ReplicaFault where no connection can be made, or none while
        `is_wanted`.

        A kept connection that turns out to be closed fails with StaleConnection, and so does one of
        a process that stops before it has answered: send again, with is_fresh, on a new connection.
        That one is stale only where one more process has stopped. Attempt.send says what counts.
        """
        head = self._head(method, path, headers, len(body))
        loop = asyncio.get_running_loop()
        for _ in range(0 if is_fresh else len(self._idle)):
            connection = self._idle.pop()
            is_old = loop.time() - connection.kept_s > _STALE_AFTER_S
            if connection.is_ending and not is_old:
                self._idle.appendleft(connection)  # for a later request
            elif connection.is_ending:
                connection.abort()  # its body has no end
            elif connection.is_open:
                exchange = Exchange(loop, may_be_stale=is_old)
                connection.send(exchange, head, body)
                return exchange
        connection = await self._connect(is_wanted)
        exchange = Exchange(loop, may_be_stale=False)
        connection.send(exchange, head, body)
        return exchange

    async def request(
        self,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes = b"",
        *,
        is_fresh: bool = False,
    ) -> tuple[int, bytes]:
        """Return status and body of a whole response. Raises ReplicaFault."""
        while True:
            exchange = await self.send(method, path, headers, body, is_fresh=is_fresh)
            try:
                await exchange.head()
                return exchange.status, await exchange.body()
            except StaleConnection:
                is_fresh = True
            finally:
                exchange.close()

    async def _connect(self, is_wanted: Callable[[], bool]) -> _Connection:
        url, loop = self._url, asyncio.get_running_loop()
        port, generation = url.port_number, self._generation
        opening = asyncio.ensure_future(
            loop.create_connection(
                lambda: _Connection(self, generation), url.host, port, ssl=self._tls
            )
        )
        try:
            left_s = self._connect_s
            while left_s > 0 and is_wanted() and not opening.done():
                began_s = loop.time()
                await asyncio.wait({opening}, timeout=min(left_s, _MAX_COUNTED_S))
                left_s -= min(loop.time() - began_s, _MAX_COUNTED_S)
            if not opening.done():
                waited_s = self._connect_s - max(left_s, 0.0)
                why = f"no connection to {url.shown} within {waited_s:.3g} s"
                raise ReplicaFault(why, is_suspect=False)
            _, connection = opening.result()
        except OSError as error:
            if error.errno in _NO_FILES or _lacks_files():
                raise NoFiles from error
            why = f"no connection to {url.shown} ({reason_of(error)})"
            raise ReplicaFault(why, is_suspect=False) from error
        except ValueError as error:  # such as of a line that was not written out
            why = f"no connection to {url.shown} (it names no host)"
            raise ReplicaFault(why, is_suspect=False) from error
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result()[1].abort()
            raise
        finally:
            opening.cancel()
        if not connection.is_open:
            raise ReplicaFault(f"{url.shown} closed the connection at once", is_suspect=False)
        self._all.add(connection)
        return connection

    def lose(self, processes: Collection[bytes]) -> None:
        """End the connections to processes of the server that have stopped, by their numbers, and
        those that may be to one of them."""
        for connection in tuple(self._all):
            if connection.process in processes or connection.may_be_lost:
                connection.lose()

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for another request; end it where the pool is full, or was closed since
        it was opened."""
        if connection.generation == self._generation and len(self._idle) < _MAX_IDLE:
            connection.kept_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def dropped(self, connection: _Connection) -> None:
        """Forget a connection that was closed."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the kept connections, and those in use once their responses are complete: another
        server may answer at the address next. Later requests open new ones."""
        self._generation += 1
        self.has_processes = False
        while self._idle:
            self._idle.pop().abort()

    def _head(
        self, method: bytes, path: bytes, headers: Sequence[tuple[bytes, bytes]], num_bytes: int
    ) -> bytes:
        lines = [b"%b %b%b HTTP/1.1" % (method, self._url.path.encode(), path)]
        lines += [b"%b: %b" % header for header in headers]
        if num_bytes or method == b"POST":
            lines.append(b"content-length: %d" % num_bytes)
        return b"\r\n".join([*lines, b"", b""])


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel break a connection once its path is lost."""
    with suppress(OSError):  # the other end has closed it already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _lacks_files() -> bool:
    """Return whether this process can open no more files; errors of names do not say it."""
    try:
        os.close(os.dup(0))
    except OSError as error:
        return error.errno in _NO_FILES
    return False
