"""Half-closed clients, which have only finished sending: their responses, and when they leave.

A client that has closed its connection looks the same until something is sent to it. For the
servers of API and router, which decide what they send. Always holds: the bytes of a response are
those that any other client gets.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

# The beginning of every response; sent ahead of it to a client that has stopped sending. Where the
# client has closed the connection, its system answers with a reset.
PROBE = b"HTTP/1.1 "
# Intervals of looks for a reset: the first one, and the limit of their doubling.
_LOOK_S, _MAX_LOOK_S = 0.01, 1.0


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


def abort_at_reset(
    transport: asyncio.Transport, is_answering: Callable[[], bool], wait_s: float = _LOOK_S
) -> None:
    """Abort the connection of a client that turns out to have closed it, rather than half of it.

    is_answering: returns whether a response is still to be written; afterwards nothing is done.
    """

    def look() -> None:
        if not is_answering() or transport.is_closing():
            return
        if _is_reset(transport.get_extra_info("socket").fileno()):
            transport.abort()
        else:
            abort_at_reset(transport, is_answering, min(2 * wait_s, _MAX_LOOK_S))

    asyncio.get_running_loop().call_later(wait_s, look)


def _is_reset(descriptor: int) -> bool:
    """Return whether the other end of a socket has closed it in both directions."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
