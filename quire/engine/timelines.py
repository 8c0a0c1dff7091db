"""Answer QueryTimelines: what happened to some requests, and since when that is kept.

Runs between two steps, on request only: the work is bounded in streams and steps.
"""

from __future__ import annotations

from quire.engine.process.messages import QueryTimelines, TimelinesReported
from quire.scheduler.scheduler import Scheduler


def timelines_of(scheduler: Scheduler, query: QueryTimelines, now_ms: float) -> TimelinesReported:
    """Return the answer."""
    history = scheduler.history
    oldest_ms = history.oldest_ms
    return TimelinesReported(
        ask_id=query.ask_id,
        reports=scheduler.timelines(query.prefixes, now_ms),
        kept_steps=history.num_steps,
        kept_ms=0.0 if oldest_ms is None else now_ms - oldest_ms,
    )
