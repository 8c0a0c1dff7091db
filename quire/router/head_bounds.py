"""BoundedHeads: uvicorn's HTTP connection, with bounds on size and time of a request's head.

uvicorn bounds heads for its other parser only, and sends chunks to HTTP/1.0 clients, which do not
know them: here streams to these end with the connection. It closes the connection of a client that
has only finished sending (a half-closed one), which is answered here, as by `quire serve`. A
response's head is one write with the first bytes of its body. Always holds: a client that sends a
head without an end, or as much between two pieces of a body or behind it, is refused and closed
after 64 KiB; no refusal is sent within the answer to an earlier request, or ahead of it; a client
that sends no head is closed after HEAD_TIME_S, or sooner where the process has no room for more
connections, but not while a request is open; one that reads nothing of the rest of a response is
closed after REST_TIME_S.
"""

from __future__ import annotations

import asyncio
import math
import resource
import sys
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.base.close_delimited import CloseDelimited
from quire.base.half_closed import PROBE, BegunTransport, abort_at_reset
from quire.base.http_apis import ERROR_CODE_HEADER
from quire.base.plain_http_parser import DeclinesUpgrade, framing_of
from quire.base.waiting_connections import WaitingConnections
from quire.router.faults import Refusal

MAX_HEAD_BYTES = 64 << 10
HEAD_TIME_S = 30.0
REST_TIME_S = 60.0
# Requests that may wait behind one that is answered: as many more as come are not read.
MAX_PIPELINED = 128
# In a scope: what writes pieces of the response's body without a message.
WRITER = "quire.writer"
# A refused client may still be writing; closing at once would discard the response.
_LINGER_S = 1.0
# Connections without a request, those that have waited for longest first.
_IDLE: dict[BoundedHeads, None] = {}


def _response(status: bytes, message: str, code: str | None) -> bytes:
    """Return an error of a request, the API of which is not known, in OpenAI's form. status: with
    its reason phrase."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    of_code = b"" if code is None else b"%b: %b\r\n" % (ERROR_CODE_HEADER, code.encode())
    return (
        b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\n%b"
        b"content-length: %d\r\n\r\n%b"
    ) % (status, of_code, len(body), body)


_HEAD_TOO_LONG = Refusal(
    431,
    "headers_too_large",
    f"the head of a request may have {MAX_HEAD_BYTES} bytes; send fewer or shorter headers",
)


def max_connections() -> int:
    """Return how many connections of clients leave room for as many to replicas."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2


class _Response:
    """A transport for the start of one response: uvicorn writes the head by itself, and here it is
    held until the bytes after it. Both are one write, and the client wakes up once. Pieces of the
    body can be written without a message (PieceWriter)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._transport, self.cycle, self._head = cycle.transport, cycle, b""
        self.is_closing = cycle.transport.is_closing

    @property
    def can_write(self) -> bool:
        """Whether pieces are chunks of a response that has begun, and the client reads."""
        cycle = self.cycle
        is_open = not (cycle.disconnected or cycle.response_complete or cycle.flow.write_paused)
        return is_open and bool(cycle.chunked_encoding) and not self._head

    def write_piece(self, body: bytes) -> None:
        """Write a chunk."""
        if body:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    @property
    def has_begun(self) -> bool:
        """Whether its head is there."""
        return self.cycle.response_started

    @property
    def is_over(self) -> bool:
        """Whether all of it was written, or its client has left."""
        return self.cycle.response_complete or self.cycle.disconnected

    def write(self, piece: bytes) -> None:
        """Hold the head, or write it with what follows."""
        if not self.cycle.response_started:  # an interim response
            self._transport.write(piece)
        elif self._head:
            self.end(piece)
        else:
            self._head = piece

    def end(self, piece: bytes = b"") -> None:
        """Write a head that is held, and hold nothing more."""
        head, self._head = self._head, b""
        if head:
            self.cycle.transport = self._transport
            self._transport.write(head + piece)

    def close(self) -> None:
        """Close the connection."""
        self.end()
        self._transport.close()

    def probe(self) -> None:
        """Write the beginning of what comes next: of the head, or of the length of a chunk, which
        may begin with zeros. A client that has closed its connection answers with a reset."""
        if cast(Any, self.cycle.transport) is self:
            self._transport.write(PROBE)
            self._transport = cast(asyncio.Transport, BegunTransport(self._transport))
        elif self.cycle.chunked_encoding:
            self._transport.write(b"0")

    def lost(self) -> None:
        """Note that the connection is gone. uvicorn notes it of the request that came last, which
        may wait behind this one."""
        cycle = self.cycle
        cycle.disconnected = cycle.disconnected or not cycle.response_complete
        cycle.message_event.set()


class BoundedHeads(DeclinesUpgrade, HttpToolsProtocol):
    """Counts the bytes of a head that is not complete, and ends the wait for it. waiting: where it
    was accepted. _head_bytes: since the head, or the last piece of its body, began."""

    def __init__(
        self, *arguments: Any, waiting: WaitingConnections | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._waiting = waiting
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._response: _Response | None = None
        self._reads_nothing = False  # a head is too long, or more requests wait than may

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept those that wait behind it."""
        super().connection_made(transport)
        while _IDLE and len(self.connections) > max_connections():
            oldest = next(iter(_IDLE))
            oldest._stop_timer()
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._await_head()
        if self._waiting is not None and self._waiting.poll(0):
            self._waiting.accept()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_timer()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        if self._response is not None:
            self._response.lost()
        super().connection_lost(exc)

    def data_received(self, received: bytes) -> None:
        """Parse more bytes, unless they belong to a head, or to trailers, without an end."""
        if self._reads_nothing:
            return
        self._head_bytes += len(received)
        self._received = received
        super().data_received(received)
        self._received = b""
        if self._reads_nothing:
            return
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            too_long = _HEAD_TOO_LONG
            status = b"431 Request Header Fields Too Large"
            self._refuse(_response(status, str(too_long), too_long.code))
        elif not self._in_head and self.cycle is not None and self.cycle.response_complete:
            self._await_head()  # behind the rest of a body that was refused before it came

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection of a client that has only finished sending until it is answered."""
        cycle, response = self.cycle, self._response
        if response is None or cycle.more_body or cycle.response_complete:
            return None  # the transport closes itself
        self._stop_timer()
        cycle.keep_alive = False
        response.probe()
        abort_at_reset(self.transport, lambda: not self.cycle.response_complete)
        return True

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._in_head, self._head_bytes = True, 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete. Where too many wait, it ends the connection behind the last of
        these: its client sends it again, as HTTP allows."""
        self._stop_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reads_nothing, self.cycle.keep_alive = True, False
        if not self._reads_nothing:
            super().on_headers_complete()
        self._in_head, self._head_bytes = False, 0  # a target that is none is part of a head

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._head_bytes = 0
        if not self._reads_nothing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a body is complete."""
        if self.parser.should_upgrade() and framing_of(self.headers):
            return  # an offer of another protocol is: its body is to come
        if not self._reads_nothing:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request, for uvicorn. Its scope has what closes a connection that is not read."""
        cycle.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        if cycle.scope["http_version"] in ("0.9", "1.0"):
            cycle.keep_alive = False
            app = CloseDelimited(app, cycle)
        self._response = _Response(cycle)
        scope: dict[str, Any] = cast(dict[str, Any], cycle.scope)
        scope[WRITER] = self._response
        cycle.transport = cast(asyncio.Transport, self._response)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Note that it has no request, unless the next one was sent already."""
        if self._response is not None:
            self._response.end()
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if not (has_next or self.transport.is_closing()):
            _IDLE.setdefault(self)
            if self._in_head:
                self._await_head()
        self._await_reader()

    def _await_reader(self, before: float = math.inf) -> None:
        """Close the connection once nothing of a response is read for REST_TIME_S after its end:
        uvicorn would wait. That of an open request is its own affair (ClientResponse). before:
        bytes that were unread at the last look."""
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        if not self.cycle.response_complete:
            return
        unread = self.transport.get_write_buffer_size()
        if unread >= before:
            self.transport.abort()
        elif unread:
            self._rest_timer = self.loop.call_later(REST_TIME_S, self._await_reader, unread)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as `quire serve` does; uvicorn calls this."""
        message = (
            f"{msg} It is not HTTP/1.1 that can be read: check its first line, headers and "
            "content-length, and that the address begins with http://"
        )
        self._refuse(_response(b"400 Bad Request", message, None))

    def _refuse(self, refusal: bytes) -> None:
        """Read nothing more, and close the connection: after a refusal, or behind the answers to
        the requests before."""
        self._reads_nothing = True
        self._stop_timer()
        if self.pipeline and self.cycle.more_body:  # it waits, and never has its body
            self.pipeline.popleft()
            assert self._response is not None, "others wait for their answers"
            self.cycle = self.pipeline[0][0] if self.pipeline else self._response.cycle
        is_body = not self._in_head and self.cycle is not None and self.cycle.more_body
        if self._is_answering and (not is_body or self._has_begun):
            self.cycle.keep_alive = False
            return
        if not is_body or self._is_answering:  # else it was answered before its body came
            self.transport.write(refusal)
        if self._in_head:
            self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self._response is not None and not self._response.is_over

    @property
    def _has_begun(self) -> bool:
        """Whether a part of a response was sent, and its end was not."""
        return self._is_answering and self._response is not None and self._response.has_begun

    def _await_head(self) -> None:
        if self._is_answering:  # its head may be sent in the meantime
            return
        _IDLE.setdefault(self)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIME_S, self.transport.close)

    def _stop_timer(self) -> None:
        _IDLE.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
