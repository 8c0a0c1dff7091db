"""Forecast: when a request that waits would begin, have its first token, and end.

The machine is taken as a server whose milliseconds are shared by those that run: what is ahead is
work in milliseconds (prompts, and tokens likely to be made, at the batch's price), and a request
begins when so much of it is done that a place is free. Knows no order (how many are ahead is an
argument) and no clock. Always holds: nothing is foretold before a few steps were timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.prompts import LONG_SHARE
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket

# Steps that must have been timed before anybody is refused for what they foretell.
LEAST_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A moment. rows: that run together when it is busy; depth: positions a row attends to;
    token_ms: of the machine for one of a row's tokens; running_ms, waiting_ms: work left."""

    rows: int
    depth: float
    token_ms: float
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
    ) -> None:
        self._limits = limits
        self._state = state
        self._cache = cache
        self._speed = speed
        self._lengths = lengths
        self._queue = queue

    @property
    def knows(self) -> bool:
        """Whether enough steps were timed to foretell anything."""
        return self._speed.num_steps >= LEAST_STEPS

    def drain_ms(self) -> float:
        """Until all that wait now have begun."""
        return self._begin_ms(self._load(), len(self._queue))

    def retry_after_s(self) -> float | None:
        """When to come again: all that wait now have begun, within a second and an hour."""
        return min(max(self.drain_ms() / 1000.0, 1.0), 3600.0) if self.knows else None

    def first_token_ms(self, ticket: Ticket, num_ahead: int, num_cached: int = 0) -> float:
        """From now to the first token of `ticket`, which waits behind num_ahead others; num_cached
        of its tokens need no computing."""
        load = self._load()
        return self._begin_ms(load, num_ahead) + self._prompt_ms(
            load, num_cached, len(ticket.token_ids), is_long=ticket.is_long
        )

    def rest_ms(self, ticket: Ticket) -> float:
        """From the first token of `ticket` to its end."""
        load = self._load()
        depth = len(ticket.token_ids) + ticket.likely_tokens / 2
        step_ms = self._speed.step_ms(load.rows, (load.rows - 1) * load.depth + depth)
        return (ticket.likely_tokens - 1) * step_ms

    def _load(self) -> _Load:
        state, speed, waiting = self._state, self._speed, max(len(self._queue), 1)
        active = state.active
        num_running = len(active)
        mean_known, mean_likely = (
            self._queue.num_tokens / waiting,
            self._queue.likely_tokens / waiting,
        )
        tokens = self._queue.num_tokens + self._queue.likely_tokens / 2
        tokens += float(np.add.reduce(state.tokens.lengths[active], dtype=np.float64))
        depth = tokens / max(num_running + len(self._queue), 1)
        fit = self._cache.num_tokens / max(mean_known + mean_likely, 1.0)
        most = min(self._limits.max_num_seqs, num_running + len(self._queue), int(fit))
        rows = max(most, num_running, 1)
        token_ms = speed.step_ms(rows, rows * depth) / rows
        uncomputed = float(np.add.reduce(state.goal[active] - state.scheduled[active]))
        left = float(np.add.reduce(state.ceiling[active] - state.goal[active], dtype=np.float64))
        left = min(left, num_running * max(self._lengths.typical(), 1.0) / 2)
        return _Load(
            rows=rows,
            depth=depth,
            token_ms=token_ms,
            running_ms=uncomputed * speed.now.token_ms + left * token_ms,
            waiting_ms=len(self._queue) * speed.span_ms(0, int(mean_known))
            + self._queue.likely_tokens * token_ms,
        )

    def _begin_ms(self, load: _Load, num_ahead: int) -> float:
        """Until one behind num_ahead others has a place."""
        waiting = max(len(self._queue), 1)
        mean_tokens = self._queue.num_tokens / waiting
        ahead_ms = load.waiting_ms * num_ahead / waiting
        prompts_ms = num_ahead * self._prompt_ms(load, 0, int(mean_tokens), is_long=False)
        free_blocks = self._cache.num_free - (num_ahead + 1) * self._cache.blocks_for(
            int(mean_tokens)
        )
        if num_ahead < len(self._state.free_slots) and free_blocks >= 0:
            return prompts_ms
        # When it begins all other places are taken, on the average by those half done.
        mean_ms = load.waiting_ms / waiting
        return max(load.running_ms + ahead_ms - (load.rows - 1) * mean_ms / 2, prompts_ms, 0.0)

    def _prompt_ms(self, load: _Load, start: int, end: int, *, is_long: bool) -> float:
        """Computing a prompt's tokens beside those that run."""
        if end <= start:
            return 0.0
        span_ms, num_beside = self._speed.span_ms(start, end), len(self._state.active)
        if not num_beside:
            num_steps = -(-(end - start) // self._limits.max_num_batched_tokens)
            return span_ms + num_steps * self._speed.now.fixed_ms
        beside_ms = self._speed.step_ms(num_beside, num_beside * load.depth)
        step_tokens = max(self._limits.max_num_batched_tokens - num_beside, 1)
        parts = max((end - start) / step_tokens, 1.0)
        if is_long:
            parts = max(parts, span_ms / (LONG_SHARE * beside_ms))
        if self._limits.tpot_target_ms:
            room_ms = max(self._limits.tpot_target_ms - beside_ms, 0.1 * beside_ms)
            parts = max(parts, span_ms / room_ms)
        return span_ms + parts * beside_ms
