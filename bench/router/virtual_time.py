"""An event loop with a clock that goes on only while nothing is ready.

A run of minutes takes seconds and is the same each time, on any machine, busy or not. Knows no
router. Always holds: no time passes while anything can run.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _VirtualSelector(selectors.SelectSelector):
    """A selector that lets the time pass instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("nothing can happen any more")
        if not found and timeout is not None:
            self.now_s += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now_s


def run_virtual(story: Coroutine[Any, Any, Any]) -> Any:
    """Run a story in virtual time."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(story)
        loop.run_until_complete(asyncio.sleep(0.1))  # what was cancelled ends
        return result
    finally:
        loop.close()
