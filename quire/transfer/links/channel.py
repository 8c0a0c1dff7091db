"""Channel: messages over one connected socket, each within a time limit.

A frame is a kind, three zero bytes, the payload's length, and the payload; inline bytes of a block
follow its frame. Knows no key, no lease and no block. Always holds: no more bytes are read than the
kind of a message allows; a call ends within its limit, however slowly the other side sends.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from quire.transfer.links.messages import KINDS, AnyMessage, MessageError

_HEAD = struct.Struct("<B3xI")
# Bytes that the kernel may keep for one connection beyond what is read: a few blocks.
_BUFFER_BYTES = 1 << 20


class LinkTimeout(OSError):
    """The other side took too long."""


class LinkClosed(OSError):
    """The other side has closed the connection."""


class Channel:
    """Both directions of one connection; one thread uses it. `close` may be called from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._is_closed = False
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None

    def secure(self, secured: Callable[[socket.socket], socket.socket]) -> None:
        """Go on over what `secured` makes of the connection. Raises OSError."""
        self._socket = secured(self._socket)
        self._tls = self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if self._is_closed:
            self.close()
            raise LinkClosed("the connection was closed during its handshake")

    def send(
        self, message: AnyMessage, inline: bytes | memoryview = b"", *, within_s: float
    ) -> None:
        """Send a message, and the bytes of a block after it. Raises OSError."""
        payload = message.pack()
        deadline_s = time.monotonic() + within_s
        parts = [memoryview(_HEAD.pack(message.kind, len(payload)) + payload)]
        parts.append(memoryview(inline).cast("B"))
        for part in parts:
            while part:
                self._limit(deadline_s)
                try:
                    part = part[self._socket.send(part) :]
                except TimeoutError as error:
                    raise LinkTimeout("the other side takes no more bytes") from error

    def receive(self, *allowed: type[AnyMessage], within_s: float) -> AnyMessage:
        """Return the next message.

        Raises MessageError unless it is one of `allowed`, and OSError.
        """
        deadline_s = time.monotonic() + within_s
        head = bytearray(_HEAD.size)
        self._read(memoryview(head), deadline_s)
        number, length = _HEAD.unpack(head)
        kind = KINDS.get(number)
        if kind is None or kind not in allowed:
            named = ", ".join(one.__name__ for one in allowed)
            found = f"kind {number}" if kind is None else kind.__name__
            raise MessageError(f"a message is {found}; expected is {named}")
        if length > kind.max_bytes:
            raise MessageError(
                f"a {kind.__name__} has {length} bytes; at most {kind.max_bytes} are allowed"
            )
        payload = bytearray(length)
        self._read(memoryview(payload), deadline_s)
        return kind.unpack(bytes(payload))

    def receive_inline(self, out: memoryview, *, within_s: float) -> None:
        """Read the bytes of a block into `out`. Raises OSError."""
        self._read(out, time.monotonic() + within_s)

    def has_input(self, wait_s: float = 0.0) -> bool:
        """Return whether a message, or the end of the connection, can be received."""
        if self._tls is not None and self._tls.pending():
            return True
        poller = select.poll()  # unlike select, for any number of descriptors
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def close(self) -> None:
        """End both directions, which ends a call in another thread too."""
        self._is_closed = True
        with suppress(OSError):  # it is not connected any more
            # Below TLS: what another thread reads next is the end, and never what is not decrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, view: memoryview, deadline_s: float) -> None:
        while view:
            self._limit(deadline_s)
            try:
                count = self._socket.recv_into(view)
            except TimeoutError as error:
                raise LinkTimeout("the other side sends nothing") from error
            if not count:
                raise LinkClosed("the other side has closed the connection")
            view = view[count:]

    def _limit(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkTimeout("the other side is too slow")
        self._socket.settimeout(left_s)
