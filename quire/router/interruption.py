"""Interruption: how long a stream without its replica had no event, and where that time went.

It begins with the last event that the client has, since nothing later is known to have been
computed, and ends with the next one. Is given times and reads no clock. Always holds: the phases
follow one another and their sum is the whole interruption; where several attempts are needed, those
that failed count as placement.
"""

from __future__ import annotations

PHASES = ("detection", "placement", "acceptance")


class Interruption:
    """Of one stream. cause: of its first failure. last_s: when its last event came; noted_s: when
    the stream was found to have failed."""

    def __init__(self, cause: str, *, last_s: float, noted_s: float) -> None:
        self.cause = cause
        self.noted_s = noted_s
        self._last_s = last_s
        self._sent_s = noted_s

    def sent(self, now_s: float) -> None:
        """Note that a request that continues the stream was sent."""
        self._sent_s = now_s

    def whole_s(self, now_s: float) -> float:
        """Return its length if the next event comes now."""
        return now_s - self._last_s

    def resumed_s(self, now_s: float) -> float:
        """Return the part after the failure was noted."""
        return now_s - self.noted_s

    def phases_s(self, now_s: float) -> tuple[float, ...]:
        """Return the length of each of PHASES: until the failure was noted, until the last request
        was sent, until it had output."""
        return (
            self.noted_s - self._last_s,
            self._sent_s - self.noted_s,
            now_s - self._sent_s,
        )
