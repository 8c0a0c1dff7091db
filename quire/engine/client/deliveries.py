"""Deliveries: the deltas of a step with many rows, handed out in several iterations of the loop.

Each wakes a task that writes. Hundreds of them take long, and what else has come, such as new
requests, would be read after all of them only. A request that still waits for its deltas gets later
ones with them, which is cheaper, and where an engine is ahead most do. The first delta of a stream
that continues is not held up: it was interrupted. Knows no engine. Always holds: the deltas of a
request keep their order, and none is held up where a step has few.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from quire.engine.client.open_streams import UnreadQueue
from quire.engine.output.text_delta import TextDelta
from quire.engine.process.messages import Fault

# Requests that get deltas in one iteration of the event loop.
MAX_AT_ONCE = 64

Unread = UnreadQueue[TextDelta | Fault]


class Deliveries:
    """is_active: whether deltas wait, so that later ones must be added."""

    is_active = False

    def __init__(self) -> None:
        self._deltas: dict[Unread, list[TextDelta]] = {}

    def add(self, deltas: Sequence[tuple[Unread, TextDelta]]) -> None:
        """Hand out deltas, now or in a later iteration of the event loop."""
        for unread, delta in deltas:
            waiting = self._deltas.get(unread)
            if waiting is not None:
                waiting.append(delta)
            elif delta.known is not None:
                unread.put(delta)
            else:
                self._deltas[unread] = [delta]
        if not self.is_active:
            self._hand_out()

    def finish(self) -> None:
        """Hand out all deltas now, as where an error follows."""
        while self._deltas:
            self._put(next(iter(self._deltas)))

    def _hand_out(self) -> None:
        for unread in list(islice(self._deltas, MAX_AT_ONCE)):
            self._put(unread)
        self.is_active = bool(self._deltas)
        if self.is_active:
            asyncio.get_running_loop().call_soon(self._hand_out)

    def _put(self, unread: Unread) -> None:
        for delta in self._deltas.pop(unread):
            unread.put(delta)
