"""The events of one resumable stream, numbered from 1, kept so that a broken reader can go on.

One writer puts events in, one reader at a time takes them from any number on that is still kept.
Events that were read stay while there is room; those nobody has read are never dropped: the writer
waits for room instead. Knows no HTTP and no meaning of an event. Always holds: `most_bytes` are
kept at most (beside the last event; or one event, where that alone is larger), and numbers have no
gap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

MOST_BYTES = 1024 * 1024


class EventJournal:
    """See the top of this file. All of it in the event loop's thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.num_bytes = 0
        self.ended = False
        self._most_bytes = most_bytes
        self._events: deque[bytes] = deque()
        self._first = 1
        self._num_read = 0
        self._changed = asyncio.Event()

    @property
    def first(self) -> int:
        """Number of the first event that is kept."""
        return self._first

    @property
    def last(self) -> int:
        """Number of the last event there is; 0 before there is one."""
        return self._first + len(self._events) - 1

    async def put(self, event: bytes) -> None:
        """Keep an event; waits while there is no room for it."""
        while not self._has_room(len(event)):
            await self._change()
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def put_last(self, event: bytes) -> None:
        """Keep the last event, whether there is room or not."""
        self._events.append(event)
        self.num_bytes += len(event)
        self.end()

    def end(self) -> None:
        """No more events come."""
        self.ended = True
        self._wake()

    async def after(self, number: int) -> bytes:
        """The events behind `number` that are there, at least one of them; b"" behind the last.

        What is at or before `number` counts as read. `number` must be first - 1 to last.
        """
        self._num_read = max(self._num_read, number)
        self._wake()
        while number >= self.last and not self.ended:
            await self._change()
        return b"".join(islice(self._events, number + 1 - self._first, None))

    def __len__(self) -> int:
        """How many events are kept."""
        return len(self._events)

    def _has_room(self, num_bytes: int) -> bool:
        while self._events and self.num_bytes + num_bytes > self._most_bytes:
            if self._first > self._num_read:
                return False
            self.num_bytes -= len(self._events.popleft())
            self._first += 1
        return True

    async def _change(self) -> None:
        await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
