"""VirtualClock: time that advances only when it is waited on.

The simulation's clock, as the engine's clock is the server's. Always holds: it never goes back.
"""

from __future__ import annotations


class VirtualClock:
    """Milliseconds since the simulation's start."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        """Return the current time."""
        return self._now_ms

    def wait_until(self, moment_ms: float) -> None:
        """Advance the time to `moment_ms`, if that is later."""
        if moment_ms > self._now_ms:
            self._now_ms = moment_ms
