"""FramedSocket: an authenticated connection to another rank, for messages of the start-up.

Both ends prove that they have the same key (quire/base/key_proof.py), the accepting one first; the
key itself is never sent. A message is its length and its bytes. Knows no program, no process and no
rendezvous. Always holds: before the other end has proved the key, some hundred bytes are read from
it at most; a message above the limit is refused before it is read. Bytes are not encrypted.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

from quire.base.key_proof import NONCE_BYTES, PROOF_BYTES, KeyProof

# Ranks of another protocol are recognised by these bytes.
MAGIC = b"quire-ranks-2\n\0\0"
_LENGTH = struct.Struct(">Q")
# A start has a whole program; an answer names each tensor of a stage.
_MAX_MESSAGE_BYTES = 256 << 20
# A connection without traffic is checked after so many seconds, as often, and so many times.
_KEEPALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))


class WrongKey(Exception):
    """The other end has another key, or is no rank."""


class FramedSocket:
    """One end. host: the address of the other one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.host: str = connection.getpeername()[0]

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def is_closed(self) -> bool:
        """Whether the other end has closed the connection, as far as is known here."""
        return self.closes_within(0.0)

    def closes_within(self, seconds: float) -> bool:
        """Return whether the other end has closed the connection, or does so meanwhile."""
        try:
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            if not waiting.poll(1000.0 * seconds):
                return False
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # closed here, too
            return True

    def prove(self, key: bytes, *, is_server: bool) -> None:
        """Prove the key and check the other end's proof. Raises WrongKey, OSError."""
        own = KeyProof(key, is_server=is_server)
        if is_server:
            other = self._hello()
            self._socket.sendall(MAGIC + own.nonce + own.own(other))
            try:
                proof = self._read(PROOF_BYTES)
            except ConnectionError:  # the other end has found the key to differ
                raise WrongKey from None
            if not own.accepts(proof, other):
                raise WrongKey
            return
        self._socket.sendall(MAGIC + own.nonce)
        other = self._hello()
        if not own.accepts(self._read(PROOF_BYTES), other):
            raise WrongKey
        self._socket.sendall(own.own(other))

    def send(self, message: bytes) -> None:
        """Send a message. Raises OSError."""
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self, *, max_bytes: int = _MAX_MESSAGE_BYTES) -> bytes:
        """Return the next message. Raises OSError, also where it has more than `max_bytes`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > max_bytes:
            raise OSError(f"a message of {length} bytes; at most {max_bytes} are allowed")
        return self._read(length)

    def send_fields(self, fields: dict[str, Any]) -> None:
        """Send a message of JSON."""
        self.send(json.dumps(fields).encode())

    def receive_fields(self, *, max_bytes: int = _MAX_MESSAGE_BYTES) -> dict[str, Any]:
        """Return the next message of JSON. Raises OSError."""
        message = self.receive(max_bytes=max_bytes)
        try:
            fields = json.loads(message)
        except ValueError as error:
            raise OSError("a message is not JSON") from error
        if not isinstance(fields, dict):
            raise OSError("a message is not an object of JSON")
        return fields

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each call from now on; None: no limit. Calls then raise TimeoutError."""
        self._socket.settimeout(seconds)

    def detach(self) -> int:
        """Return the descriptor, blocking, which belongs to the caller; this object is closed."""
        self._socket.settimeout(None)
        return self._socket.detach()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _hello(self) -> bytes:
        if self._read(len(MAGIC)) != MAGIC:
            raise WrongKey
        return self._read(NONCE_BYTES)

    def _read(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("the connection was closed by the other end")
            parts += part
        return bytes(parts)
