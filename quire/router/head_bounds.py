"""BoundedHeads: uvicorn's HTTP connection, with a bound on the size of a request's head.

uvicorn bounds heads for its other parser only. Always holds: a client that sends a head without an
end is refused and closed after 64 KiB.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.base.waiting_connections import WaitingConnections

MAX_HEAD_BYTES = 64 << 10
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: text/plain\r\ncontent-length: 55\r\n\r\n"
    b"the head of a request may have 65536 bytes; send fewer\n"
)


class BoundedHeads(HttpToolsProtocol):
    """Counts the bytes of a head that is not complete. waiting: where it was accepted."""

    def __init__(
        self, *arguments: Any, waiting: WaitingConnections | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._waiting = waiting
        self._head_bytes = 0
        self._in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept those that wait behind it."""
        super().connection_made(transport)
        if self._waiting is not None and self._waiting.poll(0):
            self._waiting.accept()

    def data_received(self, received: bytes) -> None:
        """Parse more bytes, unless they belong to a head without an end."""
        if self._in_head:
            self._head_bytes += len(received)
        super().data_received(received)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._in_head = False
        super().on_headers_complete()
