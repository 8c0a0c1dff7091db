"""HeartbeatRunner: a Runner that reports about once a second that a long step goes on.

A step may take longer than the watchdog of a client waits; the executor's counter
of operations shows that it moves. Costs an event a second while plans are out and nothing while
none is. Knows no clock: it counts its own periods. Always holds: a beat is sent only where
operations were done and no plan was collected since the last look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.base.records import StepPlan, StepResult
from quire.engine.core import Runner
from quire.runner.handle import Handle

_PERIOD_S = 1.0


class HeartbeatRunner:
    """Passes plans on. `ops_done` may be called in any thread; `beat` is called in our own."""

    def __init__(
        self,
        runner: Runner,
        *,
        ops_done: Callable[[], int],
        beat: Callable[[int], None],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._runner = runner
        self._ops_done = ops_done
        self._beat = beat
        self._period_s = period_s
        self._num_submitted = self._num_collected = 0
        self._awake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-heartbeat", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> Handle:
        """As the runner's."""
        self._num_submitted += 1
        if not self._awake.is_set():
            self._awake.set()
        return self._runner.submit(plan)

    def collect(self, handle: Handle) -> StepResult:
        """As the runner's."""
        try:
            return self._runner.collect(handle)
        finally:
            self._num_collected += 1

    def close(self) -> None:
        """End the heartbeat, then close the runner."""
        self._ended.set()
        self._awake.set()
        self._thread.join()
        self._runner.close()

    def _watch(self) -> None:
        seen = (-1, -1)
        while True:
            self._awake.wait()  # with no plan out: for ever
            if self._ended.wait(self._period_s):
                return
            self._awake.clear()
            if self._num_submitted > self._num_collected:
                self._awake.set()
                now = (self._num_collected, self._ops_done())
                if now[0] == seen[0] and now[1] != seen[1]:
                    self._beat(now[1])
                seen = now
