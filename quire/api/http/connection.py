"""HTTP connections, with the bounds that uvicorn's protocol leaves out.

Headers and trailers are bounded in bytes and lines (431); headers must arrive within a time limit,
after which the connection is closed. A second request sent before the first is answered is neither
read nor answered: the connection is closed after the first, and the client retries it, as HTTP
allows. So a connection is always read from while a request runs, and a client that disconnects is
noticed. A client that has only finished sending (a half-closed connection) is answered; a probe
distinguishes it from one that has disconnected. HTTP/1.0 clients get no chunked responses: theirs
end with the connection. ConnectionTable holds all connections of the process and evicts idle ones.
Knows no route. Always holds: the memory that one connection uses is bounded, and OPEN_CONNECTIONS
has the connection's current state.
"""

from __future__ import annotations

import asyncio
import enum
import resource
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.api.http.dialect import Dialect
from quire.api.http.errors import HEAD_TOO_LARGE
from quire.api.http.refusal import FULL_REPORT, TLS_HANDSHAKE, TLS_REPORT, refusal
from quire.base.close_delimited import CloseDelimited
from quire.base.half_closed import PROBE, BegunTransport, abort_at_reset
from quire.base.plain_http_parser import DeclinesUpgrade, framing_of

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
HEAD_TIME_S = 30.0
# A refused client may still be writing; closing at once would discard the response.
_LINGER_S = 1.0
# Descriptors that are no clients': sockets, files, connections not served yet. At least; of all.
_SPARE_FILES, _SPARE_SHARE = 64, 1 / 16


class ConnectionState(enum.Enum):
    """What a connection waits for, in the order in which connections are evicted."""

    IDLE = enum.auto()  # for the next request of a kept-alive connection
    HANDSHAKE = enum.auto()  # for the client's part of a TLS handshake
    HEAD = enum.auto()  # for the rest of a request's head
    ACTIVE = enum.auto()  # for the answer


class Evictable(Protocol):
    """An open connection."""

    def evict(self) -> None:
        """Close it at once; it is no longer in the table."""


def max_connections() -> int:
    """Return how many connections the limit on open files leaves room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max_connections_of(limit)


def max_connections_of(open_files: int) -> int:
    """Return how many connections a limit on open files leaves room for."""
    return max(open_files - max(_SPARE_FILES, int(open_files * _SPARE_SHARE)), 1)


class ConnectionTable:
    """Open connections of this process by state, each in the order in which it entered the state.

    Always holds: there are at most as many connections as descriptors allow, and at most half of
    them are TLS handshakes; a connection with an active request is never evicted. Every operation
    takes constant time, however many connections there are.
    """

    def __init__(self, limit: Callable[[], int] = max_connections) -> None:
        self._limit = limit
        self._by_state: dict[ConnectionState, dict[Evictable, None]] = {
            state: {} for state in ConnectionState
        }
        self._states: dict[Evictable, ConnectionState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def add(self, connection: Evictable, state: ConnectionState) -> None:
        """Add a connection; evict others if there are too many now."""
        self._states[connection] = state
        self._by_state[state][connection] = None
        limit = self._limit()
        if len(self._by_state[ConnectionState.HANDSHAKE]) > max(limit // 2, 1):
            self._evict(ConnectionState.HANDSHAKE)
        if len(self._states) > limit:
            self._make_room()

    def move(self, connection: Evictable, state: ConnectionState) -> None:
        """Record that a connection waits for something else now; no effect once it is removed."""
        before = self._states.get(connection)
        if before is not None:
            del self._by_state[before][connection]
            self._states[connection] = state
            self._by_state[state][connection] = None

    def remove(self, connection: Evictable) -> None:
        """Forget a connection that was closed; no effect if it was evicted."""
        state = self._states.pop(connection, None)
        if state is not None:
            del self._by_state[state][connection]

    def _make_room(self) -> None:
        for state in ConnectionState:
            if state is not ConnectionState.ACTIVE and self._by_state[state]:
                self._evict(state)
                return

    def _evict(self, state: ConnectionState) -> None:
        """Close the connection that has been in `state` the longest."""
        connection = next(iter(self._by_state[state]))
        self.remove(connection)
        if state is not ConnectionState.IDLE:  # its client expects an answer
            FULL_REPORT.add()
        connection.evict()


# One table a process: its limit on descriptors covers all its listening sockets.
OPEN_CONNECTIONS = ConnectionTable()


class Connection(DeclinesUpgrade, HttpToolsProtocol):
    """uvicorn's protocol with bounds. Created by uvicorn for each connection.

    dialect: writes refusals, since the path is not known yet. waiting: its WaitingConnections.
    """

    _head_bytes = 0
    _in_head = True
    _ignores_input = False
    _is_close_delimited = False
    _head_timer: asyncio.TimerHandle | None = None
    _disconnected: asyncio.Future[None] | None = None

    def __init__(self, *args: Any, dialect: Dialect, **options: Any) -> None:
        self._dialect, self._waiting = dialect, options.pop("waiting", None)
        super().__init__(*args, **options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._await_head()
        OPEN_CONNECTIONS.add(self, ConnectionState.HEAD)
        if self._waiting is not None and self._waiting.poll(0):
            self._waiting.accept()

    def evict(self) -> None:
        """Close the connection in favour of a new one."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers and report the disconnect."""
        OPEN_CONNECTIONS.remove(self)
        self._stop_timer()
        super().connection_lost(exc)
        self._report_disconnect()

    def data_received(self, piece: bytes) -> None:
        """Refuse a head that is too large before the parser has assembled it."""
        if self._ignores_input or self.transport.is_closing():
            return
        if self._in_head:
            self._await_head()
            if not self._head_bytes and piece[0] == TLS_HANDSHAKE:
                TLS_REPORT.add()
                self.send_400_response("This is TLS.")  # no TLS, so the handshake ends
                return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        self._head_bytes += len(piece)  # since the head, or a piece of its body, began
        self._received = piece
        super().data_received(piece)
        self._received = b""
        if not self._in_head and not self._is_answering and not self.transport.is_closing():
            self._await_head()  # the rest of a body after an early response

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection of a client that has only finished sending until it is answered."""
        if not (self._is_answering and self._in_head) or self.scheme == "https":
            return None  # the transport closes itself; TLS has no half-closed connections here
        self._stop_timer()
        self._ignores_input, self.cycle.keep_alive = True, False
        if not self.cycle.response_started:
            self.transport.write(PROBE)
            self.cycle.transport = cast(asyncio.Transport, BegunTransport(self.transport))
        elif (probe := cast(dict[str, Any], self.cycle.scope).get("quire.probe")) is not None:
            probe()
        abort_at_reset(self.transport, lambda: self._is_answering)
        return True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; the parser calls this for each."""
        super().on_header(name, value)
        if not self._ignores_input and len(self.headers) > MAX_HEADERS:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Begin the request, unless another one is still being answered."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if not self._ignores_input and num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        if self._ignores_input:
            return
        self._stop_timer()
        if self._is_answering:
            self._ignores_input, self.cycle.keep_alive = True, False
            return
        OPEN_CONNECTIONS.move(self, ConnectionState.ACTIVE)
        # Set when the client disconnects, so that a request needs no task to wait for that.
        self._disconnected = self.loop.create_future()
        self.scope["quire.disconnected"] = self._disconnected  # type: ignore[typeddict-unknown-key]
        # Ends a connection that is not read from: a close would wait for the client.
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        self.scope["quire.transport"] = self.transport  # type: ignore[typeddict-unknown-key]
        # Lets a stream write an event without an ASGI message through every layer.
        self.scope["quire.write"] = self._write_part  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._in_head, self._head_bytes = False, 0  # a target that is none is part of a head

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body from the parser; a refused request has none."""
        self._head_bytes = 0
        if not self._ignores_input:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the next head."""
        is_offer = self.parser.should_upgrade() and framing_of(self.headers)  # its body is to come
        if not (self._ignores_input or is_offer):
            self._in_head, self._head_bytes = True, 0
            super().on_message_complete()
            self.flow.resume_reading()  # after a long body, to notice a disconnect

    def on_response_complete(self) -> None:
        """Go on after a response was written; its cycle calls this."""
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            # uvicorn's timer closes the connection, which waits for unread data to be sent.
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.transport.abort
            )
        is_between = self._in_head and self._head_timer is None
        OPEN_CONNECTIONS.move(self, ConnectionState.IDLE if is_between else ConnectionState.HEAD)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        """Start a request, for uvicorn; HTTP/1.0 has no chunked encoding."""
        self._is_close_delimited = cycle.scope["http_version"] in ("0.9", "1.0")
        if self._is_close_delimited:
            cycle.keep_alive = False
            app = CloseDelimited(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with an error body of the dialect."""
        self._refuse(
            b"400 Bad Request",
            f"{msg} It is not HTTP/1.1 that can be read: check its first line, headers and "
            f"content-length, and that the address begins with {self.scheme}://",
            code=None,
        )

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _report_disconnect(self) -> None:
        if self._disconnected is not None and not self._disconnected.done():
            self._disconnected.set_result(None)

    def _write_part(self, body: bytes) -> bool:
        """Write a part of the active response as `send` would; return False if that would wait, or
        need anything but a write."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if not (cycle.response_started and body):
            return False
        if cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif self._is_close_delimited:
            self.transport.write(body)
        else:
            return False
        return True

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIME_S, self.transport.close)
            if not self._is_answering:
                OPEN_CONNECTIONS.move(self, ConnectionState.HEAD)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        message = (
            f"the request's head is too large; at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} "
            "headers are allowed; send less"
        )
        self._refuse(b"431 Request Header Fields Too Large", message, code=HEAD_TOO_LARGE.code)

    def _refuse(self, status: bytes, message: str, *, code: str | None) -> None:
        """Write a refusal, then read nothing more from this connection."""
        self._ignores_input = True
        if self._is_answering:
            if self._in_head or self.cycle.response_started:  # write nothing into that answer
                self.cycle.keep_alive = False
                return
            # Its own body is broken: end it as if its client had disconnected.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._report_disconnect()
        elif not self._in_head:  # it was answered before its body came
            self.transport.close()
            return
        self.transport.write(refusal(self._dialect, status, message, code=code))
        self._stop_timer()
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)
