"""Resumes: new requests wait a moment while many streams of their model continue.

Where a replica has failed, its streams are sent to the others all at once. Each new request among
them would make them wait longer, and it has waited for less itself. Streams for which there is no
other replica hold up nothing. Reads no clock but to wait. Always holds: a request waits at most
HOLD_S, once, whatever fails; a few streams hold up nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter

HOLD_S = 1.0
# So many interrupted streams are those of a replica, not of single exchanges.
MIN_STREAMS = 8


class Resumes:
    """num_held: requests that wait now."""

    def __init__(self) -> None:
        self.num_held = 0
        self._num_streams: Counter[str] = Counter()
        self._waiting: dict[str, asyncio.Event] = {}

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
