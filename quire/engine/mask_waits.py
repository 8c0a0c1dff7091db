"""TimedMaskWaits: waits for grammar masks, measured for timelines.

The runner reads no clock, so the engine that serves passes it this. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from quire.base.clock import Clock
from quire.runner.grammar_rows import Masks, wait_for_masks


class TimedMaskWaits:
    """Waits for grammar masks that are not made when the trunk has run; notes (end, ms) of each."""

    def __init__(self, waits: deque[tuple[float, float]], clock: Clock) -> None:
        self._waits = waits
        self._clock = clock

    def __call__(self, masks: Future[Masks]) -> None:
        """Wait for `masks`."""
        if masks.done():
            return
        began_ms = self._clock.now_ms()
        wait_for_masks(masks)
        ended_ms = self._clock.now_ms()
        self._waits.append((ended_ms, ended_ms - began_ms))
