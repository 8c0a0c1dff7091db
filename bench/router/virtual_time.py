"""An event loop with a clock that goes on only while nothing is ready.

A run of minutes takes seconds and is the same each time, on any machine, busy or not. Both ends of
a socket may be in the loop; what waits for a thread or a process may not. Knows no router. Always
holds: no time passes while anything can run, but for a tick where one is asked for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

# What is sent to a socket of the loop is there at once, or a moment later on a busy machine.
_ARRIVAL_S = 0.001


class _VirtualSelector(selectors.DefaultSelector):
    """A selector that lets the time pass instead of waiting."""

    def __init__(self, tick_s: float) -> None:
        super().__init__()
        self.now_s = 100.0
        self._tick_s = tick_s

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += self._tick_s
        found = super().select(0)
        if not found and timeout != 0 and len(self.get_map()) > 1:  # other than the loop's own
            found = super().select(_ARRIVAL_S)
        if not found and timeout is None:
            raise RuntimeError("nothing can happen any more")
        if not found and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own. tick_s: what a turn of the loop takes."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self._virtual = _VirtualSelector(tick_s)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now_s


def run_virtual(story: Coroutine[Any, Any, Any], *, tick_s: float = 0.0) -> Any:
    """Run a story in virtual time. tick_s: see VirtualLoop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(tick_s)) as runner:
        result = runner.run(story)
        runner.run(asyncio.sleep(0.1))  # what was cancelled ends
        return result
