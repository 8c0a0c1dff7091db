"""QueueTimeout: requests that have waited for their first step as long as they may.

Counts from arrival. Knows no order of service. Always holds: a request that has run, if only for a
step, is never among them; asking costs as much as is overdue.
"""

from __future__ import annotations

from collections import deque

from quire.base.errors import QueueTimedOut
from quire.scheduler.sequence import SequenceState


class QueueTimeout:
    """Sequences in order of arrival. limit_ms: how long they may wait; 0: for ever."""

    def __init__(self, limit_ms: float) -> None:
        self._limit_ms = limit_ms
        self._waiting: deque[SequenceState] = deque()

    def note(self, sequence: SequenceState) -> None:
        """Add a new request."""
        if not self._limit_ms:
            return
        waiting, place = self._waiting, len(self._waiting)
        # One that has waited elsewhere before, such as a prompt of a list, came before others.
        while place and waiting[place - 1].request.arrival_ms > sequence.request.arrival_ms:
            place -= 1
        waiting.insert(place, sequence)

    def overdue(self, now_ms: float) -> list[SequenceState]:
        """Return those that have waited too long, each once."""
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
        """Return the error to report."""
        waited_ms = now_ms - sequence.request.arrival_ms
        return QueueTimedOut(
            f"the request waited {waited_ms:.0f} ms for its first step, at most "
            f"{self._limit_ms:.0f} ms are allowed here (--queue-timeout); nothing of it was "
            "computed: try again when less is asked",
            retry_after_s=retry_after_s,
        )
