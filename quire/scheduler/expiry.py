"""Expiry: whose time is over, by their own wishes or by the queue's limit, and what they are told.

Ends them. Knows moments and the roster; no budget, no blocks. Always holds: who has begun is past
waiting, and so is a group of which any has; a request is told once.
"""

from __future__ import annotations

import math

from quire.base.errors import OverloadedError
from quire.scheduler.deadlines import Deadlines
from quire.scheduler.doors import deadline_passed
from quire.scheduler.forecast import Forecast
from quire.scheduler.queue_time import QueueTime
from quire.scheduler.roster import Roster
from quire.scheduler.ticket import NO_SLOT, Ticket

# Ids of requests that were ended, and what to say.
Expired = tuple[tuple[str, ...], OverloadedError]


class Expiry:
    """queue_timeout_ms: how long a request may wait for its first step; 0: for ever."""

    def __init__(self, roster: Roster, forecast: Forecast, queue_timeout_ms: float) -> None:
        self._roster = roster
        self._forecast = forecast
        self._deadlines = Deadlines()
        self._queue_time = QueueTime(queue_timeout_ms)

    def note(self, ticket: Ticket, waiting: Ticket | None) -> None:
        """`ticket` has come; who waits for it, see Roster.come."""
        self._deadlines.note(ticket)
        if waiting is not None:
            self._queue_time.note(waiting)

    def expire(self, now_ms: float) -> list[Expired]:
        """End what has waited for its first step too long, or whose deadline is over."""
        expired: list[Expired] = []
        for ticket, is_whole in self._deadlines.passed(now_ms):
            if is_whole:
                error = deadline_passed(ticket, self._forecast)
                if ticket.foretold_end is not None:
                    self._forecast.margin.came(ticket.foretold_end, now_ms)
                self._roster.abort(ticket)
                expired.append(((ticket.request.request_id,), error))
            elif (
                ticket.beams is None
                and ticket.slot == NO_SLOT
                and math.isnan(ticket.first_token_ms)
            ):
                ticket.missed_first_token = True
                self._roster.requeue(ticket)
        for ticket in self._queue_time.overdue(now_ms):
            if ticket.alive:  # it may have gone with its group
                expired += self._time_out(ticket, now_ms)
        return expired

    def _time_out(self, ticket: Ticket, now_ms: float) -> list[Expired]:
        """`ticket` has waited too long: it goes with its group, unless one of that has begun."""
        if ticket.beams is not None:
            group = tuple(self._roster.forget_beams(ticket.beams))
        else:
            leader = ticket.leader or ticket
            group = (leader, *leader.forks)
            if any(one.was_admitted for one in group):
                return []
            group = tuple(one for one in group if one.alive)
            for one in reversed(group):  # the leader last: nobody is to take its place
                self._roster.withdraw(one)
        retry_after_s = self._forecast.retry_after_s()
        error = self._queue_time.error(ticket, now_ms, retry_after_s=retry_after_s)
        return [(tuple(one.request.request_id for one in group), error)]
