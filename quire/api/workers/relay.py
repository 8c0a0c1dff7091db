"""One HTTP exchange with another API process over its private socket, streamed.

A minimal client: one request, its response, then the connection closes. Knows no route. Always
holds: a response that breaks off raises SiblingGone; only unread data is buffered, so a slow reader
slows the sender down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httptools

# Bytes of a response that are buffered.
_MAX_BUFFERED = 64 * 1024


class SiblingGone(Exception):
    """The other process has ended, or does not answer."""


class SiblingExchange:
    """A sent request and its response: status and headers first, then the body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = self._has_ended = False

    @classmethod
    async def open(
        cls,
        socket: Path,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        limit_s: float,
    ) -> SiblingExchange:
        """Send a request and wait for the head of its response. Raises SiblingGone."""
        lines = [f"{method} {target} HTTP/1.1", "host: localhost", "connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        exchange: SiblingExchange | None = None
        try:
            async with asyncio.timeout(limit_s):
                exchange = cls(*await asyncio.open_unix_connection(socket, limit=_MAX_BUFFERED))
                exchange._writer.write("\r\n".join(lines).encode("latin-1") + body)
                while not exchange._has_head:
                    await exchange._feed()
                return exchange
        except (OSError, TimeoutError) as error:
            if exchange is not None:
                exchange.close()
            raise SiblingGone(f"{socket.name}: {error!r}") from error
        except BaseException:
            if exchange is not None:
                exchange.close()
            raise

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises SiblingGone if it breaks off."""
        while True:
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield b"".join(pieces)
            elif self._has_ended:
                return
            else:
                await self._feed()

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Close the connection, even if the response was not read."""
        self._writer.transport.abort()

    async def _feed(self) -> None:
        try:
            received = await self._reader.read(_MAX_BUFFERED)
            if not received:
                raise SiblingGone("the answer broke off")
            self._parser.feed_data(received)
        except (OSError, httptools.HttpParserError) as error:
            raise SiblingGone(repr(error)) from error

    # ---- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Record that the head is complete."""
        self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, piece: bytes) -> None:
        """Record a piece of the body."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Record that the response is complete."""
        self._has_ended = True
