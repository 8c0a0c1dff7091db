"""QueueTime: which requests have waited for their first step as long as they may.

Counts from a request's arrival. Knows no order of service. Always holds: who has run, if only for
a step, is never among them; asking costs as much as there is to tell.
"""

from __future__ import annotations

from collections import deque

from quire.base.errors import QueueTimedOut
from quire.scheduler.ticket import Ticket


class QueueTime:
    """Tickets in order of arrival. limit_ms: how long they may wait; 0: for ever."""

    def __init__(self, limit_ms: float) -> None:
        self._limit_ms = limit_ms
        self._waiting: deque[Ticket] = deque()

    def note(self, ticket: Ticket) -> None:
        """`ticket` has come."""
        if self._limit_ms:
            self._waiting.append(ticket)

    def overdue(self, now_ms: float) -> list[Ticket]:
        """Those that have waited too long; each is told once."""
        found = []
        while self._waiting:
            ticket = self._waiting[0]
            is_waiting = ticket.alive and not ticket.was_admitted
            if is_waiting and now_ms - ticket.request.arrival_ms < self._limit_ms:
                break
            self._waiting.popleft()
            if is_waiting:
                found.append(ticket)
        return found

    def error(self, ticket: Ticket, now_ms: float, *, retry_after_s: float | None) -> QueueTimedOut:
        """What its caller is told."""
        waited_ms = now_ms - ticket.request.arrival_ms
        return QueueTimedOut(
            f"the request waited {waited_ms:.0f} ms for its first step, at most "
            f"{self._limit_ms:.0f} ms are allowed here (--queue-timeout); nothing of it was "
            "computed: try again when less is asked",
            retry_after_s=retry_after_s,
        )
