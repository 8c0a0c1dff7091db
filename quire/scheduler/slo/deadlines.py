"""Deadlines: requests with an objective that is due, soonest first.

A heap of moments. Knows no order of service and no work. Always holds: asking costs as much as is
due; moments of requests that have ended are removed, however late they are.
"""

from __future__ import annotations

import heapq

from quire.scheduler.sequence import SequenceState

_SLACK = 64


class Deadlines:
    """Moments at which answers, or first tokens, are due."""

    def __init__(self) -> None:
        # (when, number, whether it is the answer's, sequence); numbers differ.
        self._moments: list[tuple[float, int, bool, SequenceState]] = []
        self._num_noted = 0
        self._most = _SLACK

    def note(self, sequence: SequenceState) -> None:
        """Add the objectives of a new request."""
        request = sequence.request
        objectives = ((request.ttft_slo_ms, False), (request.deadline_ms, True))
        for within_ms, is_whole in objectives:
            if within_ms is not None:
                when_ms = request.arrival_ms + within_ms
                self._num_noted += 1
                heapq.heappush(self._moments, (when_ms, self._num_noted, is_whole, sequence))
        if len(self._moments) > self._most:
            self._moments = [moment for moment in self._moments if moment[3].alive]
            heapq.heapify(self._moments)
            self._most = 2 * len(self._moments) + _SLACK

    def passed(self, now_ms: float) -> list[tuple[SequenceState, bool]]:
        """Return live sequences with an objective that is overdue, each once.

        With whether it is that of the whole answer.
        """
        if not self._moments or self._moments[0][0] > now_ms:
            return []
        found = []
        while self._moments and self._moments[0][0] <= now_ms:
            _, _, is_whole, sequence = heapq.heappop(self._moments)
            if sequence.alive:
                found.append((sequence, is_whole))
        return found
