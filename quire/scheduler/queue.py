"""WaitingQueue: the requests not running, in the order of the policy's keys.

Knows keys and tickets only. Kept sorted: entering costs a binary search, leaving too; walking
it in order touches only what is looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from quire.scheduler.ticket import Ticket

_Key = tuple[tuple[float, ...], int]


class WaitingQueue:
    """Tickets by (key, arrival); two never compare equal because arrivals differ."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._tickets: dict[_Key, Ticket] = {}
        self._key_of: dict[Ticket, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Ticket]:
        """Tickets in order. The one just yielded may be removed while iterating."""
        place = 0
        while place < len(self._keys):
            key = self._keys[place]
            yield self._tickets[key]
            if place < len(self._keys) and self._keys[place] is key:
                place += 1

    def add(self, ticket: Ticket, key: tuple[float, ...]) -> None:
        """Put a ticket in its place."""
        full_key = (key, ticket.arrival)
        insort(self._keys, full_key)
        self._tickets[full_key] = ticket
        self._key_of[ticket] = full_key

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands."""
        key = self._key_of.pop(ticket)
        del self._tickets[key]
        del self._keys[bisect_left(self._keys, key)]
