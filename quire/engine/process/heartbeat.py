"""Heartbeat: report ten times a second that the engine's process lives while it has work.

A step may take longer than a client waits for a sign of life. A beat has the executor's counter of
operations, which shows whether the step makes progress as well. Costs some events a second where
steps are long and nothing otherwise. Reads no clock: it counts its own periods. Always holds: a
beat is sent only if the engine has work and has collected no plan since the last check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.engine.core import StepCounts

_PERIOD_S = 0.1


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
        steps, num_collected = self._steps, -1
        # Looked at after each clear: a close before it has set `_ended` first.
        while not self._ended.is_set():
            steps.active.wait()  # set by each step that is tried
            if self._ended.wait(self._period_s):
                return
            steps.active.clear()
            if steps.num_submitted > steps.num_collected:
                steps.active.set()
            if steps.num_collected == num_collected:
                self._beat(self._ops_done())
            num_collected = steps.num_collected
