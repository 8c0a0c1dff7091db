"""EngineEvents: what happens beside a simulated engine's steps, each at its time.

In place of the threads and connections of an engine: a call is made when the engine's clock has
come to its time, or at once, and sees its own time on the clock either way. Knows no engine. Always
holds: calls are made in order of time, and those of one time in the order in which they came.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from quire.sim.clock import VirtualClock

Call = Callable[[], None]


class EngineEvents:
    """The events of one engine, and the clock of all that belongs to it."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._calls: list[tuple[float, int, Call]] = []
        self._numbers = count()
        self._moment_ms: float | None = None  # of the call that is being made

    def __len__(self) -> int:
        """Return the number of pending calls."""
        return len(self._calls)

    def now_ms(self) -> float:
        """Return the time of the call in progress, else of the engine."""
        return self._clock.now_ms() if self._moment_ms is None else self._moment_ms

    @property
    def next_ms(self) -> float:
        """Return the time of the next call; inf for none."""
        return self._calls[0][0] if self._calls else math.inf

    def at(self, moment_ms: float, call: Call) -> None:
        """Schedule a call for a time of the engine."""
        heapq.heappush(self._calls, (moment_ms, next(self._numbers), call))

    def call_at(self, moment_ms: float, call: Call) -> None:
        """Make a call now, with a later time on the clock."""
        before_ms, self._moment_ms = self._moment_ms, moment_ms
        try:
            call()
        finally:
            self._moment_ms = before_ms

    def run_due(self) -> None:
        """Make all calls of which the time has come."""
        while self._calls and self._calls[0][0] <= self._clock.now_ms():
            moment_ms, _, call = heapq.heappop(self._calls)
            self.call_at(moment_ms, call)
