"""Expiry: ends requests that missed their deadline or waited too long in the queue.

Knows moments and the request table; no budget, no blocks. Always holds: a request that has begun is
past waiting, and so is a group of which any has; an error is reported once.
"""

from __future__ import annotations

import math

from quire.base.errors import DeadlineMissed, OverloadedError, TimedOut
from quire.scheduler.request_table import RequestTable
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.slo.deadlines import Deadlines
from quire.scheduler.slo.queue_timeout import QueueTimeout
from quire.scheduler.slo.ttft_prediction import TTFTPredictor

# Ids of requests that were ended, and the error to report.
Expired = tuple[tuple[str, ...], OverloadedError]


class Expiry:
    """queue_timeout_ms: how long a request may wait for its first step; 0: for ever."""

    def __init__(
        self, requests: RequestTable, predictor: TTFTPredictor, queue_timeout_ms: float
    ) -> None:
        self._requests = requests
        self._predictor = predictor
        self._deadlines = Deadlines()
        self.is_active = False
        self._queue_time = QueueTimeout(queue_timeout_ms)

    def note(self, sequence: SequenceState, waiting: SequenceState | None) -> None:
        """Add a new request, and the sequence that waits for it (see RequestTable.add)."""
        self.is_active = True
        self._deadlines.note(sequence)
        if waiting is not None:
            self._queue_time.note(waiting)

    def expire(self, now_ms: float) -> list[Expired]:
        """End requests that waited too long for their first step, or missed their deadline."""
        expired: list[Expired] = []
        for sequence, is_whole in self._deadlines.passed(now_ms):
            if is_whole:
                error = deadline_passed(sequence, self._predictor)
                if sequence.objectives.end is not None:
                    self._predictor.margin.came(sequence.objectives.end, now_ms)
                self._requests.abort(sequence)
                expired.append(((sequence.request.request_id,), error))
            elif (
                sequence.group is None
                and sequence.slot == NO_SLOT
                and math.isnan(sequence.times.first_token_ms)
            ):
                sequence.objectives.missed_first_token = True
                self._requests.requeue(sequence)
        for sequence in self._queue_time.overdue(now_ms):
            if sequence.alive:  # it may have gone with its group
                expired += self._time_out(sequence, now_ms)
        return expired

    def _time_out(self, sequence: SequenceState, now_ms: float) -> list[Expired]:
        """End `sequence`, which has waited too long, and its group unless that has begun."""
        if sequence.group is not None:
            group = tuple(self._requests.end_group(sequence.group))
        else:
            leader = sequence.leader or sequence
            group = (leader, *leader.forks)
            if any(one.was_admitted for one in group):
                return []
            group = tuple(one for one in group if one.alive)
            for one in reversed(group):  # the leader last, so that no fork takes its place
                self._requests.withdraw(one)
        retry_after_s = self._predictor.retry_after_s()
        error = self._queue_time.error(sequence, now_ms, retry_after_s=retry_after_s)
        return [(tuple(one.request.request_id for one in group), error)]


def deadline_passed(sequence: SequenceState, predictor: TTFTPredictor) -> OverloadedError:
    """Return the error of a request that was not complete at its deadline."""
    wanted_ms = sequence.request.deadline_ms or 0.0  # it has one: it has passed
    shown = f"{wanted_ms:.0f}" if wanted_ms >= 1 else f"{wanted_ms:.3g}"
    if sequence.was_admitted:
        return TimedOut(
            f"the answer was not complete {shown} ms after the request came, its deadline_ms; it "
            "was ended: allow more time, or ask for fewer tokens"
        )
    return DeadlineMissed(
        f"the request waited for its first step until its deadline, {shown} ms after it came, was "
        "over; nothing of it was computed: try again later, or allow more time",
        retry_after_s=predictor.retry_after_s(),
    )
