"""SharedStore: the interface of a store of values that several engines share.

Values are opaque bytes under keys of KEY_BYTES. There are other writers, and the store evicts on
its own: an entry that was there may be gone, and a value may be another than was put (a crashed
writer, a failing medium): what reads it must check it (entry.py). Claims are small records with a
limited life, by which engines agree on which of them computes something. Knows no blocks and no
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Parts = Sequence[memoryview]

KEY_BYTES = 16
# A claim that was not renewed for so long has ended: its engine is gone, or hangs.
CLAIM_LEASE_S = 10.0
MAX_CLAIM_BYTES = 1 << 16


class StoreNotReady(OSError):
    """A store is being set up: for now it has nothing, and nothing is wrong with it."""


class SharedStore(Protocol):
    """Methods raise OSError where the store cannot be asked; any thread may call them."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether there is an entry now."""

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        """Read each value into the parts of its room; return its size, None if there is none.

        Parts are filled only where the value has exactly their size.
        """

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        """Store values; return for each whether it is there now (False: there is no room)."""

    def remove(self, key: bytes) -> None:
        """Remove an entry that is of no use."""

    def claim(self, key: bytes, record: bytes) -> bool:
        """Make a claim under a key; return False where there is one that is alive."""

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the records of live claims under any of these keys, maybe of others too."""

    def renew(self, key: bytes, record: bytes) -> None:
        """Keep a claim alive, if it is still this one."""

    def release(self, key: bytes, record: bytes) -> None:
        """End a claim, if it is still this one."""

    def close(self) -> None:
        """Release resources; entries stay."""
