"""Heartbeat: report about once a second that a long step makes progress.

A step may take longer than the watchdog of a client waits; the executor's counter of operations
shows progress. Costs an event a second while plans are in flight and nothing otherwise. Reads no
clock: it counts its own periods. Always holds: a beat is sent only if operations were done and no
plan was collected since the last check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.engine.core import StepCounts

_PERIOD_S = 1.0


class Heartbeat:
    """Watch the steps of one engine. `ops_done` and `beat` are called in the heartbeat's thread."""

    def __init__(
        self,
        steps: StepCounts,
        *,
        ops_done: Callable[[], int],
        beat: Callable[[int], None],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._steps = steps
        self._ops_done = ops_done
        self._beat = beat
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._steps.active.set()
        self._thread.join()

    def _watch(self) -> None:
        steps, seen = self._steps, (-1, -1)
        while True:
            steps.active.wait()  # set by the next submitted plan
            if self._ended.wait(self._period_s):
                return
            steps.active.clear()
            if steps.num_submitted > steps.num_collected:
                steps.active.set()
                now = (steps.num_collected, self._ops_done())
                if now[0] == seen[0] and now[1] != seen[1]:
                    self._beat(now[1])
                seen = now
