"""QueueTimeout: which requests have waited for their first step as long as they may.

Counts from a request's arrival. Knows no order of service. Always holds: who has run, if only for
a step, is never among them; asking costs as much as there is to tell.
"""

from __future__ import annotations

from collections import deque

from quire.base.errors import QueueTimedOut
from quire.scheduler.sequence import SequenceState


class QueueTimeout:
    """Tickets in order of arrival. limit_ms: how long they may wait; 0: for ever."""

    def __init__(self, limit_ms: float) -> None:
        self._limit_ms = limit_ms
        self._waiting: deque[SequenceState] = deque()

    def note(self, sequence: SequenceState) -> None:
        """`sequence` has come."""
        if self._limit_ms:
            self._waiting.append(sequence)

    def overdue(self, now_ms: float) -> list[SequenceState]:
        """Those that have waited too long; each is told once."""
        found = []
        while self._waiting:
            sequence = self._waiting[0]
            is_waiting = sequence.alive and not sequence.was_admitted
            if is_waiting and now_ms - sequence.request.arrival_ms < self._limit_ms:
                break
            self._waiting.popleft()
            if is_waiting:
                found.append(sequence)
        return found

    def error(
        self, sequence: SequenceState, now_ms: float, *, retry_after_s: float | None
    ) -> QueueTimedOut:
        """What its caller is told."""
        waited_ms = now_ms - sequence.request.arrival_ms
        return QueueTimedOut(
            f"the request waited {waited_ms:.0f} ms for its first step, at most "
            f"{self._limit_ms:.0f} ms are allowed here (--queue-timeout); nothing of it was "
            "computed: try again when less is asked",
            retry_after_s=retry_after_s,
        )
