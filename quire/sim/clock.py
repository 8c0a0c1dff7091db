"""VirtualClock: time that passes only when something says so.

What the engine's clock is to a server, this is to a simulation: the loop's owner reads it and
passes it on. Always holds: it never goes back.
"""

from __future__ import annotations


class VirtualClock:
    """Milliseconds since the simulation's start."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        """The moment it is."""
        return self._now_ms

    def wait_until(self, moment_ms: float) -> None:
        """Let time pass up to `moment_ms`; nothing where that is over already."""
        if moment_ms > self._now_ms:
            self._now_ms = moment_ms
