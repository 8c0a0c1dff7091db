"""Waits for grammar masks are measured, and only where there is one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from quire.base.clock import Clock
from quire.engine.mask_waits import TimedMaskWaits
from quire.runner.grammar_rows import NO_MASK, Masks


class ClockThatEnds(Clock):
    """Ends the masks when it is first read; a read is 2 ms after the one before."""

    def __init__(self, masks: Future[Masks]) -> None:
        self._masks = masks
        self._now_ms = 0.0

    def now_ms(self) -> float:
        if not self._masks.done():
            self._masks.set_result(NO_MASK)
        self._now_ms += 2.0
        return self._now_ms


def test_only_masks_that_are_not_ready_are_waited_for_and_noted() -> None:
    masks: Future[Masks] = Future()
    waits: deque[tuple[float, float]] = deque()
    wait = TimedMaskWaits(waits, ClockThatEnds(masks))
    wait(masks)
    assert list(waits) == [(4.0, 2.0)]
    wait(masks)
    assert len(waits) == 1
