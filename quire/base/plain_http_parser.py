"""PlainHttpParser: httptools' parser of requests, for servers that change to no other protocol.

A client may offer one with its request (Java's and curl's offer HTTP/2 in clear text), which a
server declines by answering as ever. httptools gives up at the end of such a head: it takes the
body for the other protocol. Here a further parser reads it. A connection of uvicorn takes this
parser with the first offer (DeclinesUpgrade). Knows no server and no route. Always holds:
requests and their bodies are read as they would be without the offer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import httptools

_FRAMING = (b"transfer-encoding", b"content-length")


class RequestCallbacks(Protocol):
    """What is called with the parts of requests. headers: of the newest request so far."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None:
        """Note that a request begins."""

    def on_url(self, url: bytes) -> None:
        """Take a part of its target."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""

    def on_headers_complete(self) -> None:
        """Note the end of its head."""

    def on_body(self, body: bytes) -> None:
        """Take a piece of its body."""

    def on_message_complete(self) -> None:
        """Note its end."""


def framing_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of a head that say how long its body is; b"" where it has none."""
    return b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING)


class PlainHttpParser:
    """In place of httptools.HttpRequestParser. calls: its methods are called as by that. framing:
    of a body that is to be read first. It may have no bytes: feed_data(b"") notes its end, too."""

    def __init__(self, calls: RequestCallbacks, framing: bytes = b"") -> None:
        self._calls = calls
        self._framing = framing  # of a body that is still to be read
        self._repeats_head = False
        self._parser = self._new(lambda call: call)

    def feed_data(self, received: bytes) -> None:
        """Parse bytes. Raises HttpParserError."""
        self._begin_body()
        while received:
            try:
                self._parser.feed_data(received)
            except httptools.HttpParserUpgrade as offer:
                received = received[offer.args[0] :]
                self._begin_body()
            else:
                return

    def should_upgrade(self) -> bool:
        """Return False: offers are declined."""
        return False

    def should_keep_alive(self) -> bool:
        """As httptools' method."""
        return self._parser.should_keep_alive()

    def get_http_version(self) -> str:
        """As httptools' method."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """As httptools' method."""
        return self._parser.get_method()

    def _new(self, gate: Callable[[Callable[..., None]], Any]) -> httptools.HttpRequestParser:
        """Return a parser. gate: of the calls for a head."""
        calls = self._calls
        of_parser = SimpleNamespace(
            on_message_begin=gate(calls.on_message_begin),
            on_url=gate(calls.on_url),
            on_header=gate(calls.on_header),
            on_headers_complete=gate(calls.on_headers_complete),
            on_body=calls.on_body,
            on_message_complete=self._complete,
        )
        parser = httptools.HttpRequestParser(of_parser)
        # As uvicorn's: of requests that come behind one that ends the connection.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _complete(self) -> None:
        if self._parser.should_upgrade():
            self._framing = framing_of(self._calls.headers)
            if self._framing:
                return  # only its head is
        self._calls.on_message_complete()

    def _begin_body(self) -> None:
        """Where a body is to come, let a parser read a head with its framing, and then that."""
        if not self._framing:
            return
        head, self._framing = b"POST / HTTP/1.1\r\n%b\r\n" % self._framing, b""
        self._parser = self._new(self._gated)
        self._repeats_head = True
        self._parser.feed_data(head)
        self._repeats_head = False

    def _gated(self, call: Callable[..., None]) -> Callable[..., None]:
        def passed(*parts: bytes) -> None:
            if not self._repeats_head:
                call(*parts)

        return passed


class DeclinesUpgrade:
    """Of a connection of uvicorn: requests that offer another protocol are read as any others. It
    has what it parses as _received meanwhile, and notes no end of a request with a body at an
    offer."""

    _received = b""
    headers: list[tuple[bytes, bytes]]

    def _unsupported_upgrade_warning(self) -> None:
        """Read what is behind the head of the newest request, while uvicorn handles the offer."""
        offer, connection = sys.exc_info()[1], cast(Any, self)
        assert isinstance(offer, httptools.HttpParserUpgrade), "uvicorn has caught it"
        try:
            # Where the body is empty its end is noted by feed_data, with this parser in its place.
            connection.parser = PlainHttpParser(connection, framing_of(self.headers))
            connection.parser.feed_data(self._received[offer.args[0] :])
        except httptools.HttpParserError:
            connection.send_400_response("Invalid HTTP request received.")
