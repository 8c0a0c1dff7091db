"""Forecast: when a request that waits would begin, have its first token, and end.

The machine is taken as a server whose milliseconds are shared by those that run: what is ahead is
work in milliseconds (prompts, and tokens likely to be made, at the batch's price), and a request
begins when so much of it is done that a place is free. Knows no order (how many are ahead is an
argument) and no clock; what others would do for a request says `Yielding`, who will come and go
before it `Passing`. Always holds: nothing is foretold before a few steps were timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.cache.manager import CacheManager
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.margin import Foretold, Margin
from quire.scheduler.passing import Passing
from quire.scheduler.policy import Policy
from quire.scheduler.prompts import LONG_SHARE
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket
from quire.scheduler.yielding import NO_CONCESSION, Concession, Yielding

# Steps that must have been timed before anybody is refused for what they foretell.
LEAST_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A moment. rows: that run together when it is busy; depth: positions a row attends to;
    token_ms: of the machine for one of a row's tokens; running_ms, waiting_ms: work left;
    prompts_ms: of it the prompts of those that run."""

    rows: int
    depth: float
    token_ms: float
    prompts_ms: float
    running_ms: float
    waiting_ms: float


class Forecast:
    """Reads the running state and the sums of the queue."""

    def __init__(
        self,
        limits: SchedulerLimits,
        state: RunningState,
        cache: CacheManager,
        speed: SpeedEstimate,
        lengths: LengthHistory,
        queue: WaitingQueue,
        policy: Policy,
        yielding: Yielding,
        margin: Margin,
    ) -> None:
        self._limits = limits
        self._state = state
        self._cache = cache
        self._speed = speed
        self._lengths = lengths
        self._queue = queue
        self._policy = policy
        self._yielding = yielding
        self.margin = margin
        self._passing = Passing()

    def note(self, ticket: Ticket) -> None:
        """`ticket` was let in, and waits."""
        handicap_ms = self._policy.handicap_ms(ticket)
        if not self._passing.may_pass(handicap_ms):
            return
        speed, prompt = self._speed, len(ticket.token_ids)
        rows = max(len(self._state.active), 1)
        each_ms = speed.step_ms(rows, rows * (prompt + ticket.likely_tokens / 2)) / rows
        work_ms = ticket.likely_tokens * each_ms
        if ticket.leader is None:
            work_ms += speed.span_ms(0, prompt)
        self._passing.note(ticket.request.arrival_ms, handicap_ms, work_ms)

    @property
    def knows(self) -> bool:
        """Whether enough steps were timed to foretell anything."""
        return self._speed.num_steps >= LEAST_STEPS

    def drain_ms(self) -> float:
        """Until all that wait now have begun."""
        return self._begin_ms(self._load(), len(self._queue))[0]

    def retry_after_s(self) -> float:
        """When to come again: all that wait now have begun, within a second and an hour; a second
        while nothing can be foretold."""
        return min(max(self.drain_ms() / 1000.0, 1.0), 3600.0) if self.knows else 1.0

    def first_token(
        self, ticket: Ticket, num_ahead: int, at_ms: float, num_cached: int = 0
    ) -> Foretold:
        """From at_ms, which is now, to the first token of `ticket`, which waits behind num_ahead
        others; num_cached of its tokens need no computing."""
        load, concession = self._load(), self._yielding.concession(ticket)
        handicap_ms = self._policy.handicap_ms(ticket)
        begin_ms, waits = self._begin_ms(load, num_ahead, concession, handicap_ms)
        begin_ms += self._prompt_ms(
            load, num_cached, len(ticket.token_ids), concession.rows, is_long=ticket.is_long
        )
        return Foretold(at_ms=at_ms, ms=begin_ms, waits=waits)

    def rest_ms(self, ticket: Ticket) -> float:
        """From the first token of `ticket` to its end."""
        load = self._load()
        depth = len(ticket.token_ids) + ticket.likely_tokens / 2
        step_ms = self._speed.step_ms(load.rows, (load.rows - 1) * load.depth + depth)
        return (ticket.likely_tokens - 1) * step_ms

    def _load(self) -> _Load:
        speed, waiting = self._speed, max(len(self._queue), 1)
        num_running, running = len(self._state.active), self._state.totals()
        mean_known, mean_likely = (
            self._queue.num_tokens / waiting,
            self._queue.likely_tokens / waiting,
        )
        tokens = self._queue.num_tokens + self._queue.likely_tokens / 2 + running.known
        depth = tokens / max(num_running + len(self._queue), 1)
        fit = self._cache.num_tokens / max(mean_known + mean_likely, 1.0)
        most = min(self._limits.max_num_seqs, num_running + len(self._queue), int(fit))
        rows = max(most, num_running, 1)
        token_ms = speed.step_ms(rows, rows * depth) / rows
        left = min(running.room, num_running * max(self._lengths.typical(), 1.0) / 2)
        prompts_ms = running.unscheduled * speed.now.token_ms
        return _Load(
            rows=rows,
            depth=depth,
            token_ms=token_ms,
            prompts_ms=prompts_ms,
            running_ms=prompts_ms + left * token_ms,
            waiting_ms=len(self._queue) * speed.span_ms(0, int(mean_known))
            + self._queue.likely_tokens * token_ms,
        )

    def _begin_ms(
        self,
        load: _Load,
        num_ahead: int,
        concession: Concession = NO_CONCESSION,
        handicap_ms: float = -math.inf,
    ) -> tuple[float, bool]:
        """Until one behind num_ahead others has a place, which those to come pass by its
        handicap; whether it waits for that, and not only for prompts before its own."""
        waiting = max(len(self._queue), 1)
        mean_tokens = self._queue.num_tokens / waiting
        ahead_ms = load.waiting_ms * num_ahead / waiting
        back = concession.rows
        prompts_ms = self._prompt_ms(load, 0, int(mean_tokens), back, num=num_ahead)
        if not concession.rows:  # nobody's prompt stands back
            prompts_ms += load.prompts_ms
        free_blocks = self._cache.num_free + concession.blocks
        free_blocks -= (num_ahead + 1) * self._cache.blocks_for(int(mean_tokens))
        if num_ahead < len(self._state.free_slots) + concession.slots and free_blocks >= 0:
            return prompts_ms, False
        # When it begins all other places are taken, on the average by those half done.
        mean_ms = load.waiting_ms / waiting
        begin_ms = load.running_ms + ahead_ms - (load.rows - 1) * mean_ms / 2
        wait_ms = max(begin_ms, prompts_ms, 0.0)
        return self._passing.prolonged_ms(wait_ms, handicap_ms), True

    def _prompt_ms(
        self,
        load: _Load,
        start: int,
        end: int,
        num_back: int,
        *,
        num: int = 1,
        is_long: bool = False,
    ) -> float:
        """Computing the tokens of `num` such prompts, one after the other, beside those that run,
        of which num_back stand back."""
        if end <= start or not num:
            return 0.0
        span_ms = num * self._speed.span_ms(start, end)
        num_beside = len(self._state.active) - num_back
        if not num_beside:
            num_steps = math.ceil(num * (end - start) / self._limits.max_num_batched_tokens)
            return span_ms + num_steps * self._speed.now.fixed_ms
        beside_ms = self._speed.step_ms(num_beside, num_beside * load.depth)
        step_tokens = max(self._limits.max_num_batched_tokens - num_beside, 1)
        parts = float(math.ceil(num * (end - start) / step_tokens))
        if is_long and not num_back:
            parts = max(parts, span_ms / (LONG_SHARE * beside_ms))
        if self._limits.tpot_target_ms:
            room_ms = max(self._limits.tpot_target_ms - beside_ms, 0.1 * beside_ms)
            parts = max(parts, span_ms / room_ms)
        return span_ms + parts * beside_ms
