"""One HTTP connection, with the bounds that uvicorn's protocol leaves out.

Headers are bounded in bytes and lines (431), and must have come within a time (the connection is
closed: nobody is there to be answered). A second request sent before the first is answered is
neither read nor answered: the connection is closed after the first, and its sender asks again, as
HTTP allows. So a connection is always read from while a request runs, and a caller who leaves is
noticed. Knows no route. Always holds: what one connection makes us keep is bounded.
"""

from __future__ import annotations

import asyncio
import resource
import sys

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.api.errors import HEAD_TOO_LARGE

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
HEAD_TIME_S = 30.0
# A refused sender may still be writing; closing at once would take our answer from it.
_LINGER_S = 1.0
_SPARE_FILES = 64


class Connection(HttpToolsProtocol):
    """uvicorn's, bounded. Made by uvicorn for each connection."""

    _head_bytes = 0
    _in_head = True
    _deaf = False
    _waits_since_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None
    _gone: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for the first head begins."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > _most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_timer()
        super().connection_lost(exc)
        self._tell_gone()

    def data_received(self, piece: bytes) -> None:
        """Refuse a head that is too large before the parser has put it together."""
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head:
            self._await_head()
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
                return
            self._head_bytes += len(piece)  # of the last piece, part may be the body
        super().data_received(piece)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header."""
        super().on_header(name, value)
        if not self._deaf and len(self.headers) > MAX_HEADERS:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """The head is there: begin its request, unless another is still being answered."""
        num_bytes = len(self.url)
        for name, value in self.headers:
            num_bytes += len(name) + len(value)
        if not self._deaf and num_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        if self._deaf:
            return
        self._stop_timer()
        if self._is_answering:
            self._deaf, self.cycle.keep_alive = True, False
            return
        self._in_head = False
        # How a request learns that its caller has left, without a task that waits for that.
        self._gone = self.loop.create_future()
        self.scope["quire.gone"] = self._gone  # type: ignore[typeddict-unknown-key]
        # How a response ends a connection whose other end does not read: a close would wait for it.
        self.scope["quire.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        # How a stream writes an event without a message through every layer.
        self.scope["quire.write"] = self._write_part  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser; a request that is not taken has no body."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is a head again."""
        if not self._deaf:
            self._in_head, self._head_bytes = True, 0
            super().on_message_complete()
            self.flow.resume_reading()  # a long body may have stopped it: nobody would see an end

    def send_400_response(self, msg: str) -> None:
        """uvicorn's refusal of what is not HTTP, in the form of our errors."""
        self._refuse(b"400 Bad Request", msg, code=None)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _tell_gone(self) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _write_part(self, body: bytes) -> bool:
        """Write a part of the response that is under way, as `send` would; False where it would
        wait, or do anything else than write."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if not (cycle.response_started and cycle.chunked_encoding and body):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._waits_since_s = self.loop.time()
            self._head_timer = self.loop.call_later(HEAD_TIME_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self) -> None:
        """Close the connection that has kept us waiting for a head the longest."""
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Connection) and connection._head_timer is not None
        ]
        min(waiting, key=lambda connection: connection._waits_since_s).transport.close()

    def _refuse_head(self) -> None:
        message = (
            f"the request's head is too large; at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} "
            "headers are allowed; send less"
        )
        self._refuse(b"431 Request Header Fields Too Large", message, code=HEAD_TOO_LARGE.code)

    def _refuse(self, status: bytes, message: str, *, code: str | None) -> None:
        """Answer, then hear nothing more of this connection."""
        self._deaf = True
        if self._is_answering:
            if self._in_head or self.cycle.response_started:
                # the request before it: nothing may be said in between
                self.cycle.keep_alive = False
                return
            # Its own body is broken: it ends as if its caller had left.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._tell_gone()
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = (
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n"
        )
        self.transport.write(head % (status, len(body)) + body)
        self._stop_timer()
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.close)


def _most_connections() -> int:
    """As many as this process may have files open, less some for itself."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit - _SPARE_FILES, 1)
