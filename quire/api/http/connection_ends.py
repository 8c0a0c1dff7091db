"""Responses to half-closed clients, which end with the connection.

connection.py decides which responses these are. Always holds: the bytes of the response are those
that any other client gets.
"""

from __future__ import annotations

import asyncio
import select

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


def is_reset(descriptor: int) -> bool:
    """Return whether the other end of a socket has closed it in both directions."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
