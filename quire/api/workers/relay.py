"""One HTTP exchange with another process of ours, over its private socket, bytes as they come.

A client as small as what is asked with it: one request, its answer, an end. Knows no route. Always
holds: an answer that breaks off before its end raises SiblingGone; nothing is gathered but what was
not taken yet, so whoever reads slowly is felt at the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httptools

# Bytes of an answer that may wait here.
_MOST_WAITING = 64 * 1024


class SiblingGone(Exception):
    """The other process is not there (any more), or does not answer."""


class Exchange:
    """A request that was sent, and its answer: status and headers first, then its body."""

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
    ) -> Exchange:
        """Send a request and wait for the head of its answer. Raises SiblingGone."""
        lines = [f"{method} {target} HTTP/1.1", "host: localhost", "connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(limit_s):
                exchange = cls(*await asyncio.open_unix_connection(socket, limit=_MOST_WAITING))
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
        """The body as it comes. Raises SiblingGone where it breaks off."""
        while True:
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield b"".join(pieces)
            elif self._has_ended:
                return
            else:
                await self._feed()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Let go of the connection, whatever of the answer was read."""
        self._writer.transport.abort()

    async def _feed(self) -> None:
        try:
            received = await self._reader.read(_MOST_WAITING)
            if not received:
                raise SiblingGone("the answer broke off")
            self._parser.feed_data(received)
        except (OSError, httptools.HttpParserError) as error:
            raise SiblingGone(repr(error)) from error

    # ---- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        self.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self._has_ended = True
