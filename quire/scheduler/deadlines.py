"""Deadlines: whose time has come, by requests' own wishes.

A heap of moments. Knows no order of service and no work. Always holds: asking costs as much as
there is to tell; moments of requests that have ended are cleared away, however late they are.
"""

from __future__ import annotations

import heapq

from quire.scheduler.ticket import Ticket

_SLACK = 64


class Deadlines:
    """Moments at which answers, or first tokens, are due."""

    def __init__(self) -> None:
        # (when, number, whether it is the answer's, ticket); numbers differ.
        self._moments: list[tuple[float, int, bool, Ticket]] = []
        self._num_noted = 0
        self._most = _SLACK

    def note(self, ticket: Ticket) -> None:
        """`ticket` has come."""
        request = ticket.request
        wishes = ((request.ttft_slo_ms, False), (request.deadline_ms, True))
        for within_ms, is_whole in wishes:
            if within_ms is not None:
                when_ms = request.arrival_ms + within_ms
                self._num_noted += 1
                heapq.heappush(self._moments, (when_ms, self._num_noted, is_whole, ticket))
        if len(self._moments) > self._most:
            self._moments = [moment for moment in self._moments if moment[3].alive]
            heapq.heapify(self._moments)
            self._most = 2 * len(self._moments) + _SLACK

    def passed(self, now_ms: float) -> list[tuple[Ticket, bool]]:
        """Live tickets whose moment is over, each told once; whether it was the whole answer's."""
        if not self._moments or self._moments[0][0] > now_ms:
            return []
        found = []
        while self._moments and self._moments[0][0] <= now_ms:
            _, _, is_whole, ticket = heapq.heappop(self._moments)
            if ticket.alive:
                found.append((ticket, is_whole))
        return found
