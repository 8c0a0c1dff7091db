"""Responses to half-closed clients and to HTTP/1.0 clients, which end with the connection.

connection.py decides which responses these are. Always holds: the bytes of the response are those
that any other client gets, without chunks for HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import select

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# The beginning of every response; sent ahead of it to a client that has stopped sending. Where the
# client has closed the connection, its system answers with a reset.
PROBE = b"HTTP/1.1 "


class BegunTransport:
    """A transport on which the probe, the beginning of the response, is already written."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_written = len(PROBE)

    def write(self, piece: bytes) -> None:
        """Write what follows the probe."""
        assert self._num_written == 0 or piece.startswith(PROBE), "a response begins with it"
        self._transport.write(piece[self._num_written :])
        self._num_written = 0

    def is_closing(self) -> bool:
        """Return whether the transport is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the transport once what is written is sent."""
        self._transport.close()


class CloseDelimited:
    """An application with responses that end with the connection unless they have a length."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, has_length = self._cycle, False

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:  # uvicorn counts down what it expects: always this piece
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unchunked)


def is_reset(descriptor: int) -> bool:
    """Return whether the other end of a socket has closed it in both directions."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
