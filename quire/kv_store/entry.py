"""The bytes of an entry: a head that says what it holds, a seal over both, then the block.

    head  72 bytes: MAGIC, version, encoding, size of the payload, digest of the block's chain,
          fingerprint of what computes such blocks, seal
    rest  the payload: the block's bytes, or what an encoding makes of them (int8.py)

A seal is a checksum where only the owner can write (a directory), and a keyed hash (BLAKE2b) where
others on a network can (Mooncake). Always holds: bytes that were cut, changed, or stored under
another key, by another version, model or layout are recognised.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv_store.shared_store import KEY_BYTES

Bytes = NDArray[np.uint8]
# From the head without its seal and the payload to SEAL_BYTES.
Seal = Callable[[bytes, memoryview], bytes]

MAGIC = b"QuireKVE"
VERSION = 1
SEAL_BYTES = 16
FINGERPRINT_BYTES = 16
_HEAD = struct.Struct(f"<8sHHIQ{KEY_BYTES}s{FINGERPRINT_BYTES}s")
HEAD_BYTES = _HEAD.size + SEAL_BYTES
_PERSON = b"quire kv entry"


def checksum(head: bytes, payload: memoryview) -> bytes:
    """Return a CRC-32, which finds accidents."""
    return zlib.crc32(payload, zlib.crc32(head)).to_bytes(SEAL_BYTES, "little")


def keyed_seal(key: bytes) -> Seal:
    """Return a seal that only those with the key can make."""

    def seal(head: bytes, payload: memoryview) -> bytes:
        digest = hashlib.blake2b(head, key=key, digest_size=SEAL_BYTES, person=_PERSON)
        digest.update(payload)
        return digest.digest()

    return seal


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFormat:
    """Makes and checks the heads of one engine's entries. fingerprint: of its blocks.

    payload_bytes: of each entry. encoding: the number of how payloads are made of blocks.
    """

    fingerprint: bytes
    payload_bytes: int
    encoding: int
    seal: Seal

    def head(self, key: bytes, payload: memoryview) -> bytes:
        """Return the head of an entry."""
        body = self._body(key)
        return body + self.seal(body, payload)

    def is_intact(self, key: bytes, head: memoryview, payload: memoryview) -> bool:
        """Return whether an entry is what `head` made under this key."""
        body = self._body(key)
        if bytes(head[: len(body)]) != body:
            return False
        return hmac.compare_digest(bytes(head[len(body) :]), self.seal(body, payload))

    def _body(self, key: bytes) -> bytes:
        return _HEAD.pack(
            MAGIC,
            VERSION,
            self.encoding,
            0,
            self.payload_bytes,
            key,
            self.fingerprint[:FINGERPRINT_BYTES].ljust(FINGERPRINT_BYTES, b"\0"),
        )
