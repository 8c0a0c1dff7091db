"""ResponseStore: finished responses of each API key, in memory or in a SQLite file.

A response is found only with the key that it was made with. For each key at most MAX_RESPONSES and
`max_bytes` are kept: a new one evicts those that were not used for longest, and one that alone is
larger is not kept. Always holds: no method blocks the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from quire.base.errors import QuireError

MAX_RESPONSES = 4096


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response. previous: the id of the one it continues. response, items: JSON of the response,
    and of the items of its own input."""

    id: str
    previous: str | None
    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class StoreError(QuireError):
    """The file of the store cannot be read or written."""


class ResponseStore(Protocol):
    """See the top of this file. key: of the API key; b"" without keys."""

    @property
    def is_on(self) -> bool:
        """Return whether anything is kept."""

    @property
    def max_bytes(self) -> int:
        """Return the bytes that are kept for each key."""

    async def save(self, key: bytes, stored: StoredResponse) -> None:
        """Add or replace a response. Raises StoreError."""

    async def find(self, key: bytes, id_: str) -> StoredResponse | None:
        """Return a response, and count this as a use. Raises StoreError."""

    async def change(
        self, key: bytes, id_: str, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse | None:
        """Replace a response by what `change` makes of it, and return that; None without one.

        No other change comes between. Raises StoreError, and what `change` raises.
        """

    async def delete(self, key: bytes, id_: str) -> bool:
        """Remove a response; return whether there was one. Raises StoreError."""

    def close(self) -> None:
        """Close the file."""


class MemoryStore:
    """Responses in memory, until the server ends."""

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self.is_on = max_bytes > 0
        self.max_bytes = max_bytes
        self._max_responses = max_responses
        self._of_keys: dict[bytes, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: dict[bytes, int] = {}

    async def save(self, key: bytes, stored: StoredResponse) -> None:
        """See ResponseStore."""
        await self.delete(key, stored.id)
        if stored.num_bytes > self.max_bytes:
            return
        kept = self._of_keys.setdefault(key, OrderedDict())
        kept[stored.id] = stored
        self._num_bytes[key] = self._num_bytes.get(key, 0) + stored.num_bytes
        while len(kept) > self._max_responses or self._num_bytes[key] > self.max_bytes:
            _, oldest = kept.popitem(last=False)
            self._num_bytes[key] -= oldest.num_bytes

    async def find(self, key: bytes, id_: str) -> StoredResponse | None:
        """See ResponseStore."""
        kept = self._of_keys.get(key, OrderedDict())
        if id_ in kept:
            kept.move_to_end(id_)
        return kept.get(id_)

    async def change(
        self, key: bytes, id_: str, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse | None:
        """See ResponseStore."""
        found = self._of_keys.get(key, OrderedDict()).get(id_)
        if found is None:
            return None
        changed = change(found)
        await self.save(key, changed)  # which does not wait
        return changed

    async def delete(self, key: bytes, id_: str) -> bool:
        """See ResponseStore."""
        stored = self._of_keys.get(key, OrderedDict()).pop(id_, None)
        if stored is not None:
            self._num_bytes[key] -= stored.num_bytes
        return stored is not None

    def close(self) -> None:
        """See ResponseStore."""
