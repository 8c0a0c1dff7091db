"""Reports of what happened to requests: waits with their reasons, events, and steps with rows.

Joins the histories of requests with the steps of a StepHistory. Reads the state of a scheduler's
parts and changes nothing; on request only, one stream at a time, so that an engine can compute
steps between them. Always holds: a report has counts and times of
other requests' rows, and none of their ids, tokens or tenants.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage, Miss, MissReason
from quire.base.timeline import (
    EventKind,
    HistoryEvent,
    TimelineReport,
    Wait,
    WaitReason,
)
from quire.cache.explain import miss_at
from quire.cache.manager import CacheManager
from quire.scheduler.request_history import RequestHistory
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.step_budget import CostModel
from quire.scheduler.step_history import copied
from quire.scheduler.step_rows import Span, StepReader

# Of all requests: numbers of arrival, and when each was first scheduled.
Admissions = tuple[NDArray[np.int_], NDArray[np.float64]]
# As of StepHistory.obstacles.
TimedObstacle = tuple[float, WaitReason | None, int]

# The finish reason of requests that were refused while they waited.
REFUSED = "refused"
# Streams of one request in an answer.
MAX_STREAMS = 16
# Obstacles that stop requests behind the one that meets them, by no resource of their own.
_OF_OTHERS = (WaitReason.BLOCKS,)


class TimelineQuery:
    """The reports of requests with ids that begin with one of `prefixes`, MAX_STREAMS at most."""

    def __init__(
        self,
        requests: RequestTable,
        batch: RunningBatch,
        cache: CacheManager,
        cost: CostModel,
        prefixes: Sequence[str],
    ) -> None:
        self._requests, self._batch, self._cache = requests, batch, cache
        chosen, sequences = tuple(prefixes), requests.sequences.values()
        ended = [one for one in requests.history.ended if one.request_id.startswith(chosen)]
        live = [
            _live_history(one) for one in sequences if one.history.request_id.startswith(chosen)
        ]
        found = {one.request_id: one for one in (*ended, *live)}
        self._left = list(found.values())[:MAX_STREAMS][::-1]
        self._reader = StepReader(requests.history, cost)
        if not self._left:
            return
        everyone = [*requests.history.ended, *(one.history for one in sequences)]
        self._admissions: Admissions = (
            np.array([one.arrival for one in everyone]),
            np.array([one.times.first_scheduled_ms for one in everyone]),
        )
        self._obstacles = list(requests.history.obstacles)
        self._mask_waits = copied(requests.history.mask_waits)

    @property
    def num_left(self) -> int:
        """Streams that are not reported yet."""
        return len(self._left)

    @property
    def num_packs_weighed(self) -> int:
        """Packs of steps that were computed on for all streams until now."""
        return self._reader.num_packs_weighed

    def next_report(self, now_ms: float) -> TimelineReport | None:
        """Return the report of the next stream; None after the last one."""
        if not self._left:
            return None
        one = self._left.pop()
        live = self._requests.sequences.get(one.request_id)
        until_ms = now_ms if math.isnan(one.ended_ms) else one.ended_ms
        spans = _spans(one.events, self._requests.in_flight.step)
        rows = self._reader.rows_of(spans)
        use, judged_now = _cache_use(one, self._cache)
        num_output = one.num_output_tokens
        if live is not None and live.slot >= 0:
            num_output = int(self._batch.tokens.lengths[live.slot]) - one.num_prompt_tokens
        elif live is not None:
            num_output = len(live.token_ids) - one.num_prompt_tokens
        return TimelineReport(
            request_id=one.request_id,
            stream=int(one.request_id.rpartition("/")[2]) if "/" in one.request_id else 0,
            now_ms=now_ms,
            arrival_ms=one.arrival_ms,
            first_token_ms=one.times.first_token_ms,
            ended_ms=one.ended_ms,
            prompt_tokens=one.num_prompt_tokens,
            cached_tokens=one.kv.cached_tokens,
            output_tokens=-1 if num_output is None else num_output,
            finish_reason=_finish_reason(one),
            cache_use=use,
            is_judged_now=judged_now,
            is_salted=one.miss is not None and bool(one.miss.owner.salt),
            waits=tuple(_waits(one, self._obstacles, until_ms)),
            overtaken_by=_num_overtakers(one, self._admissions, until_ms),
            events=tuple(one.events),
            dropped_events=one.num_dropped,
            rows=rows,
            is_cut=bool(spans) and (not len(rows.steps) or int(rows.steps[0]) > spans[0][0]),
            mask_waits=tuple(w for w in self._mask_waits if one.arrival_ms <= w[0] <= until_ms),
        )


def _live_history(sequence: SequenceState) -> RequestHistory:
    """Return the history of a live request; streams of beams have the events of the first beam."""
    history, group = sequence.history, sequence.group
    if group is not None and group.members[0] is not sequence:
        history.events = group.members[0].history.events
    return history


def _finish_reason(one: RequestHistory) -> str:
    if one.finish_reason is not None:
        return one.finish_reason.value
    return "" if math.isnan(one.ended_ms) else REFUSED


def _spans(events: Sequence[HistoryEvent], last_step: int) -> list[Span]:
    """Return (first step, last step, slot) of each stay in a slot."""
    spans: list[Span] = []
    for event in events:
        if event.kind is EventKind.ADMITTED:
            spans.append((event.step, last_step, event.slot))
        elif event.kind in (EventKind.PREEMPTED, EventKind.PAUSED) and spans and event.step:
            first, _, slot = spans[-1]
            spans[-1] = (first, event.step, slot)
    return spans


def _num_overtakers(one: RequestHistory, admissions: Admissions, until_ms: float) -> int:
    first_ms = one.times.first_scheduled_ms
    admitted_ms = until_ms if math.isnan(first_ms) else first_ms
    arrivals, firsts_ms = admissions
    return int(np.count_nonzero((arrivals > one.arrival) & (firsts_ms < admitted_ms)))


def _waits(one: RequestHistory, obstacles: Sequence[TimedObstacle], until_ms: float) -> list[Wait]:
    """Return its time outside slots in spans, each with one reason."""
    waits: list[Wait] = []
    for from_ms, to_ms in _periods(one, until_ms):
        waits += _spans_of_reasons(one, obstacles, from_ms, to_ms)
    return waits


def _periods(one: RequestHistory, until_ms: float) -> list[tuple[float, float]]:
    """Return when it waited in the queue; while it is paused it is in no queue."""
    periods: list[tuple[float, float]] = []
    since_ms: float | None = one.arrival_ms
    for event in one.events:
        if event.kind is EventKind.ADMITTED:
            if since_ms is not None:
                periods.append((since_ms, event.ms))
            since_ms = None
        elif event.kind in (EventKind.PREEMPTED, EventKind.RESUMED):
            since_ms = event.ms
        elif event.kind is EventKind.PAUSED:
            if since_ms is not None:
                periods.append((since_ms, event.ms))
            since_ms = None
    if since_ms is not None:
        periods.append((since_ms, until_ms))
    return periods


def _spans_of_reasons(
    one: RequestHistory, obstacles: Sequence[TimedObstacle], from_ms: float, to_ms: float
) -> list[Wait]:
    """Split a wait by what applied when: what stopped the whole queue, or else the request."""
    # From the last one before the wait on.
    begin = max(bisect_left(obstacles, from_ms, key=itemgetter(0)) - 1, 0)
    end = bisect_left(obstacles, to_ms, key=itemgetter(0))
    changes: list[tuple[float, bool, WaitReason | None]] = [
        (ms, True, _as_met_by(one, reason, arrival)) for ms, reason, arrival in obstacles[begin:end]
    ]
    changes += [(ms, False, reason) for ms, reason in one.waits if ms >= from_ms]
    of_queue: WaitReason | None = None
    of_own: WaitReason | None = None
    waits: list[Wait] = []
    at_ms = from_ms

    def close(ms: float) -> None:
        nonlocal at_ms
        reason = of_queue or of_own or WaitReason.STEP
        if ms <= at_ms:
            return
        if waits and waits[-1].reason is reason:
            waits[-1] = waits[-1]._replace(to_ms=ms)
        else:
            waits.append(Wait(at_ms, ms, reason))
        at_ms = ms

    for ms, is_of_queue, reason in sorted(changes, key=lambda change: change[0]):
        if ms >= to_ms:
            break
        close(ms)
        if is_of_queue:
            of_queue = reason
        else:
            of_own = reason
    close(to_ms)
    return waits


def _as_met_by(one: RequestHistory, reason: WaitReason | None, arrival: int) -> WaitReason | None:
    """Return an obstacle as `one` met it: behind a request that lacks blocks, the order is it."""
    if reason in _OF_OTHERS and arrival != one.arrival:
        return WaitReason.ORDER
    return reason


def _cache_use(one: RequestHistory, cache: CacheManager) -> tuple[CacheUsage, bool]:
    """Return where its prompt was found and why no more was, and whether that is judged now."""
    kv = one.kv
    if kv.cache_use is not None:
        return kv.cache_use, False
    miss: Miss | None = None
    if not cache.prefix_caching:
        miss = Miss(reason=MissReason.DISABLED, token=0)
    elif one.is_scored:
        miss = Miss(reason=MissReason.SCORED, token=kv.cached_tokens)
    elif one.miss is not None:
        point = one.miss
        miss = miss_at(
            cache,
            point.token,
            parent=point.parent,
            digest=point.digest,
            was_evicted=point.was_evicted,
            block=np.asarray(point.tokens),
            owner=point.owner,
        )
    return CacheUsage(pool_tokens=kv.cached_tokens, miss=miss), one.miss is not None
