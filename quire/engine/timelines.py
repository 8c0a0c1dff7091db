"""Answer QueryTimelines: what happened to some requests, and since when that is kept.

On request only. Always holds: between two steps at most one stream of one query is reported, so
queries delay each step by a bounded time, however many there are.
"""

from __future__ import annotations

from collections import deque

from quire.base.timeline import TimelineReport
from quire.engine.process.messages import QueryTimelines, TimelinesReported
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.timeline import TimelineQuery


class TimelineAnswers:
    """pending: queries without an answer, oldest first."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.pending: deque[QueryTimelines] = deque()
        self._query: TimelineQuery | None = None
        self._reports: list[TimelineReport] = []

    def advance(self, now_ms: float) -> TimelinesReported | None:
        """Report one stream more; return the oldest query's answer after the last one."""
        query = self._query
        if query is None:
            query = self._query = self._scheduler.query_timelines(self.pending[0].prefixes)
        report = query.next_report(now_ms)
        if report is not None:
            self._reports.append(report)
        if query.num_left:
            return None
        history = self._scheduler.history
        oldest_ms = history.oldest_ms
        answer = TimelinesReported(
            ask_id=self.pending.popleft().ask_id,
            reports=tuple(self._reports),
            kept_steps=history.num_steps,
            kept_ms=0.0 if oldest_ms is None else now_ms - oldest_ms,
        )
        self._query, self._reports = None, []
        return answer
