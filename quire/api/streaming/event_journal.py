"""EventJournal: the numbered events of one resumable stream, kept for a client that reconnects.

One writer appends events; one reader at a time reads from any number that is still kept. Events
that were read stay while there is room; unread ones are never dropped: the writer waits instead,
unless the journal drops unread events. Knows no HTTP and no meaning of an event. Always holds: at
most `max_bytes` are kept (beside the last event; or one event that alone is larger), and numbers
have no gap; ResumableStreams keeps a bounded number of journals.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from itertools import islice
from typing import Protocol

from quire.api.http.dialect import EventFraming
from quire.api.http.errors import ResumeGone
from quire.base.errors import QuireError

MAX_BYTES = 1024 * 1024


class EventJournal:
    """See the top of this file. Used in the event loop's thread only."""

    def __init__(self, max_bytes: int = MAX_BYTES, *, drops_unread: bool = False) -> None:
        self.num_bytes = 0
        self.ended = False
        self._max_bytes = max_bytes
        self._drops_unread = drops_unread
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
        """Number of the last event; 0 before there is one."""
        return self._first + len(self._events) - 1

    async def put(self, event: bytes) -> None:
        """Append an event; wait while there is no room for it."""
        while not self._has_room(len(event)):
            await self._changed.wait()
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def put_last(self, *events: bytes) -> None:
        """Append the last events, even if there is no room."""
        self._events += events
        self.num_bytes += sum(map(len, events))
        self.end()

    def end(self) -> None:
        """Mark the stream as complete."""
        self.ended = True
        self._wake()

    async def after(self, number: int) -> bytes:
        """Return the events after `number`, at least one of them; b"" after the last.

        Events up to `number` count as read. `number` must be at most `last`. Raises ResumeGone if
        events after it were dropped.
        """
        self._num_read = max(self._num_read, number)
        self._wake()
        while number >= self.last and not self.ended:
            await self._changed.wait()
        if number + 1 < self._first:
            raise ResumeGone(f"events up to {self._first - 1} are not kept any more")
        return b"".join(islice(self._events, number + 1 - self._first, None))

    def __len__(self) -> int:
        """Return the number of events that are kept."""
        return len(self._events)

    def _has_room(self, num_bytes: int) -> bool:
        while self._events and self.num_bytes + num_bytes > self._max_bytes:
            if self._first > self._num_read and not self._drops_unread:
                return False
            self.num_bytes -= len(self._events.popleft())
            self._first += 1
        return True

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class KeptStream(Protocol):
    """A resumable stream, as its readers use it.

    refusal: the error, if the request failed before its first event.
    """

    id: str
    journal: EventJournal
    framing: EventFraming
    refusal: QuireError | None

    def attach(self, reader: asyncio.Future[QuireError]) -> None:
        """Add a reader; the one before it is cut: its future is set."""

    def detach(self, reader: asyncio.Future[QuireError]) -> None:
        """Remove a reader; without a new one the stream expires."""


class ResumableStreams:
    """The resumable streams of one server by request id, bounded by memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_streams = max_bytes // MAX_BYTES
        self._streams: OrderedDict[str, KeptStream] = OrderedDict()

    def has_room(self) -> bool:
        """Make room for one more if needed, by dropping the oldest that has ended."""
        if len(self._streams) < self._max_streams:
            return True
        ended = next((id_ for id_, one in self._streams.items() if one.journal.ended), None)
        if ended is not None:
            self.drop(ended)
        return ended is not None

    def add(self, stream: KeptStream) -> None:
        """Keep a stream; call `has_room` before."""
        self._streams[stream.id] = stream

    def find(self, request_id: str) -> KeptStream | None:
        """Return the stream of a request if it is kept."""
        return self._streams.get(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a stream; its current reader can read on."""
        self._streams.pop(request_id, None)
