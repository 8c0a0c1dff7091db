"""Resumes: streams that are interrupted go first, each in the order of its last event.

Where a replica has failed, its streams are sent to the others all at once. Those that have been
without an event for longest, such as those of a replica that had just taken them over, are placed
first. Each new request among them would make them wait longer, and it has waited for less itself:
new requests wait a moment while many streams of their model continue. So do the events of other
streams, until all of these are sent: each turn of the event loop passes on what hundreds of streams
have received, and to place a stream takes several turns. Streams for which there is no other
replica hold up nothing. Reads no clock but to wait. Always holds: a request waits at most HOLD_S,
once, and an event EVENT_HOLD_S, whatever fails; a few streams hold up nothing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from itertools import count

HOLD_S = 1.0
EVENT_HOLD_S = 0.25
# So many interrupted streams are those of a replica, not of single exchanges.
MIN_STREAMS = 8


class Resumes:
    """num_held: requests that wait now."""

    def __init__(self) -> None:
        self.num_held = 0
        self._num_streams: Counter[str] = Counter()
        self._waiting: dict[str, asyncio.Event] = {}
        self._turns: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_unsent = 0  # streams that have their turn or wait for it
        self._sent: asyncio.Event | None = None  # while these are many
        self._numbers = count()

    async def turn(self, last_s: float) -> None:
        """Wait for the other streams that are to be placed in this turn of the event loop; return
        in the order of the last events. last_s: when the stream's came."""
        loop = asyncio.get_running_loop()
        if not self._turns:
            loop.call_soon(self._give_turns)
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._turns, (last_s, next(self._numbers), turn))
        self.begin_send()
        try:
            await turn
        finally:
            self.end_send()

    def begin_send(self) -> None:
        """Count a stream that is to be sent to another replica at once."""
        self._num_unsent += 1
        if self._num_unsent >= MIN_STREAMS and self._sent is None:
            self._sent = asyncio.Event()
            asyncio.get_running_loop().call_later(EVENT_HOLD_S, self._sent.set)

    def end_send(self) -> None:
        """Count it no more."""
        self._num_unsent -= 1
        if self._num_unsent < MIN_STREAMS and self._sent is not None:
            self._sent.set()
            self._sent = None

    @property
    def holds_events(self) -> bool:
        """Whether events of streams wait: see wait_for_sends."""
        return self._sent is not None and not self._sent.is_set()

    async def wait_for_sends(self) -> None:
        """Wait with an event until the streams that continue elsewhere are sent there."""
        if self._sent is not None:
            await self._sent.wait()

    def _give_turns(self) -> None:
        turns, self._turns = self._turns, []
        while turns:
            turn = heapq.heappop(turns)[-1]
            if not turn.done():  # else its request was given up
                turn.set_result(None)

    def began(self, model: str) -> None:
        """Count a stream of a model that is sent to another replica."""
        self._num_streams[model] += 1

    def ended(self, model: str) -> None:
        """Count it no more: it goes on, has ended, or waits for yet another replica."""
        self._num_streams[model] -= 1
        if self._num_streams[model] < MIN_STREAMS and model in self._waiting:
            self._waiting.pop(model).set()
        if not self._num_streams[model]:
            del self._num_streams[model]

    async def hold(self, model: str) -> bool:
        """Let the streams of a model that continue go ahead of a new request; return whether it
        has waited for them."""
        if self._num_streams.get(model, 0) < MIN_STREAMS:
            return False
        event = self._waiting.setdefault(model, asyncio.Event())
        self.num_held += 1
        try:
            async with asyncio.timeout(HOLD_S):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self.num_held -= 1
        return True
