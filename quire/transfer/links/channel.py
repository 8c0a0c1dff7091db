"""Channel: messages over one connected socket, each within a time limit.

A frame is a kind, three zero bytes, the payload's length, and the payload; inline bytes of a block
follow its frame. Frames are read through a small buffer, so that one call of the system brings many
of them; inline bytes go where they belong at once. Without TLS the system keeps the time limits:
its calls then move whole blocks, and a wakeup for each part is spared. Knows no key, no lease and
no block. Always holds: a message is not larger than its kind allows; a call ends within its limit,
however slowly the other side sends.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from quire.transfer.links.messages import KINDS, AnyMessage, MessageError

_HEAD = struct.Struct("<B3xI")
# Bytes that the kernel may keep for a connection within the machine in each direction (it takes
# twice as many): more would leave the processor's cache before they are read. Other connections
# need what is under way at their distance, which the kernel finds itself.
_KERNEL_BYTES = 1 << 18
_BUFFER_BYTES = 1 << 14
_TIME_LIMIT = struct.Struct("@ll")  # seconds and microseconds


class LinkTimeout(OSError):
    """The other side took too long."""


class LinkClosed(OSError):
    """The other side has closed the connection."""


class Channel:
    """Both directions of one connection; one thread uses it. `stop` may be called from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _is_here(connection):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, _KERNEL_BYTES)
        connection.settimeout(None)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._first = self._end = 0  # of what is in the buffer
        self._is_stopped = False
        self._ending = threading.Lock()  # no descriptor that was closed, and is another's, is shut
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None

    def secure(self, secured: Callable[[socket.socket], socket.socket]) -> None:
        """Go on over what `secured` makes of the connection, before anything is received.

        Raises OSError.
        """
        self._socket = secured(self._socket)
        self._socket.settimeout(None)
        self._tls = self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if self._is_stopped:
            raise LinkClosed("the connection was closed during its handshake")

    def send(
        self, message: AnyMessage, inline: bytes | memoryview = b"", *, within_s: float
    ) -> None:
        """Send a message, and the bytes of a block after it. Raises OSError."""
        payload = message.pack()
        deadline_s = time.monotonic() + within_s
        parts = [memoryview(_HEAD.pack(message.kind, len(payload)) + payload)]
        if len(inline):
            parts.append(memoryview(inline).cast("B"))
        while parts:
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                count = self._send_some(parts)
            except (TimeoutError, BlockingIOError) as error:
                raise LinkTimeout("the other side takes no more bytes") from error
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = parts[0][count:]

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
        if self._first < self._end or (self._tls is not None and self._tls.pending()):
            return True
        poller = select.poll()  # unlike select, for any number of descriptors
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def stop(self) -> None:
        """End both directions: a call in another thread ends, and so do all later ones."""
        self._is_stopped = True
        with self._ending, suppress(OSError):  # it is not connected any more
            # Below TLS: what another thread reads next is the end, and never what is not decrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which no other thread uses any more."""
        self.stop()
        with self._ending:
            self._socket.close()

    def _send_some(self, parts: list[memoryview]) -> int:
        """Return how many bytes of the parts were sent."""
        if self._tls is not None:
            return self._tls.send(parts[0])
        return self._socket.sendmsg(parts)

    def _read(self, view: memoryview, deadline_s: float) -> None:
        count = min(len(view), self._end - self._first)
        view[:count] = self._buffer[self._first : self._first + count]
        self._first += count
        view = view[count:]
        while len(view) >= _BUFFER_BYTES:
            view = view[self._receive_into(view, deadline_s, socket.MSG_WAITALL) :]
        while view:
            self._first, self._end = 0, self._receive_into(self._buffer, deadline_s, 0)
            self._first = min(len(view), self._end)
            view[: self._first] = self._buffer[: self._first]
            view = view[self._first :]

    def _receive_into(self, view: memoryview, deadline_s: float, flags: int) -> int:
        """Return how many bytes came."""
        self._limit(socket.SO_RCVTIMEO, deadline_s)
        try:
            # TLS decrypts record by record, and has no flags.
            count = self._socket.recv_into(view, 0, flags if self._tls is None else 0)
        except (TimeoutError, BlockingIOError) as error:
            raise LinkTimeout("the other side sends nothing") from error
        if not count:
            raise LinkClosed("the other side has closed the connection")
        return count

    def _limit(self, option: int, deadline_s: float) -> None:
        """Limit the next call. option: the system's limit of its direction."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkTimeout("the other side is too slow")
        if self._tls is not None:
            self._tls.settimeout(left_s)
            return
        left_us = max(round(left_s * 1e6), 1)  # 0 would be no limit
        limit = _TIME_LIMIT.pack(*divmod(left_us, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


def _is_here(connection: socket.socket) -> bool:
    """Return whether the other side is on this machine, as far as its address says."""
    try:
        return ipaddress.ip_address(connection.getpeername()[0]).is_loopback
    except (OSError, ValueError):  # it is gone already, or has no such address
        return False
