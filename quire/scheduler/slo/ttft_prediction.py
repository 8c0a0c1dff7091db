"""TTFTPredictor: when a waiting request would begin, have its first token, and end.

The machine is modelled as a server with milliseconds that running requests share: what is ahead is
work in milliseconds (prompts, and tokens likely to be generated, at the batch's price), and a
request begins when so much of it is done that a slot is free. Knows no order (how many are ahead is
an argument) and no clock; PriorityPreemption says what others would yield, Overtaking what later
arrivals add. Always holds: nothing is predicted before a few steps were timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.policy import Policy
from quire.scheduler.preemption.priority_preemption import (
    NOTHING_PREEMPTIBLE,
    PreemptibleShare,
    PriorityPreemption,
)
from quire.scheduler.prefill.prompt_shares import LONG_SHARE
from quire.scheduler.request_table import RequestTable
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.sequence_parts import Prediction
from quire.scheduler.slo.length_history import LengthHistory
from quire.scheduler.slo.overtaking import Overtaking
from quire.scheduler.slo.safety_margin import SafetyMargin

# Steps that must have been timed before a request is rejected for a prediction.
MIN_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The load at a moment.

    rows: that run together when it is busy; depth: positions a row attends to; token_ms: device
    time of one token of a row; running_ms, waiting_ms: work left; prompts_ms: of running_ms, that
    of prompts.
    """

    rows: int
    depth: float
    token_ms: float
    prompts_ms: float
    running_ms: float
    waiting_ms: float


class TTFTPredictor:
    """Reads the running batch and the sums of the queue."""

    def __init__(
        self,
        limits: SchedulerLimits,
        batch: RunningBatch,
        cache: CacheManager,
        speed: SpeedEstimate,
        lengths: LengthHistory,
        requests: RequestTable,
        policy: Policy,
        preemption: PriorityPreemption | None,
    ) -> None:
        self._limits = limits
        self._batch = batch
        self._cache = cache
        self._speed = speed
        self._lengths = lengths
        self._requests = requests
        self._queue = requests.queue
        self._policy = policy
        self._preemption = preemption
        self.margin = SafetyMargin()
        self._overtaking = Overtaking()

    def note(self, sequence: SequenceState) -> None:
        """Note an accepted request that waits, as a sample of later arrivals."""
        delay_ms = self._policy.delay_ms(sequence)
        if not self._overtaking.may_overtake(delay_ms):
            return
        self._requests.predict_lengths()
        speed, prompt = self._speed, len(sequence.token_ids)
        rows = max(len(self._batch.active), 1)
        each_ms = self._round_ms(rows, rows * (prompt + sequence.entry.likely_tokens / 2)) / rows
        work_ms = sequence.entry.likely_tokens * each_ms
        if sequence.leader is None:
            work_ms += speed.span_ms(0, prompt)
        self._overtaking.note(sequence.request.arrival_ms, delay_ms, work_ms)

    @property
    def knows(self) -> bool:
        """Whether enough steps were timed to predict anything."""
        return self._speed.num_steps >= MIN_STEPS

    def drain_ms(self) -> float:
        """Return the time until all that wait now have begun."""
        return self._begin_ms(self._load(), len(self._queue))[0]

    def retry_after_s(self) -> float:
        """Return when to come again: when all that wait now have begun.

        Within a second and an hour; a second while nothing can be predicted.
        """
        return min(max(self.drain_ms() / 1000.0, 1.0), 3600.0) if self.knows else 1.0

    def first_token(
        self, sequence: SequenceState, num_ahead: int, at_ms: float, num_cached: int = 0
    ) -> Prediction:
        """Predict the first token of `sequence`, which waits behind num_ahead others, from at_ms.

        at_ms is now; num_cached of its tokens need no computing.
        """
        load, preemptible_share = self._load(), NOTHING_PREEMPTIBLE
        if self._preemption is not None:
            preemptible_share = self._preemption.preemptible_share(sequence)
        delay_ms = self._policy.delay_ms(sequence)
        begin_ms, waits = self._begin_ms(load, num_ahead, preemptible_share, delay_ms)
        begin_ms += self._prompt_ms(
            load,
            num_cached,
            len(sequence.token_ids),
            preemptible_share.rows,
            is_long=sequence.entry.is_long,
        )
        return Prediction(at_ms=at_ms, ms=begin_ms, waits=waits)

    def rest_ms(self, sequence: SequenceState) -> float:
        """Return the time from the first token of `sequence` to its end."""
        load = self._load()
        depth = len(sequence.token_ids) + sequence.entry.likely_tokens / 2
        round_ms = self._round_ms(load.rows, (load.rows - 1) * load.depth + depth)
        return (sequence.entry.likely_tokens - 1) * round_ms

    def _load(self) -> _Load:
        self._requests.predict_lengths()
        speed, waiting = self._speed, max(len(self._queue), 1)
        num_running, running = len(self._batch.active), self._batch.totals()
        mean_known, mean_likely = (
            self._queue.num_tokens / waiting,
            self._queue.likely_tokens / waiting,
        )
        tokens = self._queue.num_tokens + self._queue.likely_tokens / 2 + running.known
        depth = tokens / max(num_running + len(self._queue), 1)
        fit = self._cache.num_tokens / max(mean_known + mean_likely, 1.0)
        most = min(self._limits.max_num_seqs, num_running + len(self._queue), int(fit))
        rows = max(most, num_running, 1)
        token_ms = self._round_ms(rows, rows * depth) / rows
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
        preemptible_share: PreemptibleShare = NOTHING_PREEMPTIBLE,
        delay_ms: float = -math.inf,
    ) -> tuple[float, bool]:
        """Return when a request behind num_ahead others gets a slot.

        And whether it waits for that, and not only for prompts before its own. Later arrivals
        overtake it by its delay.
        """
        waiting = max(len(self._queue), 1)
        mean_tokens = self._queue.num_tokens / waiting
        ahead_ms = load.waiting_ms * num_ahead / waiting
        back = preemptible_share.rows
        prompts_ms = self._prompt_ms(load, 0, int(mean_tokens), back, num=num_ahead)
        if not preemptible_share.rows:  # no prompt yields
            prompts_ms += load.prompts_ms
        free_blocks = self._cache.num_free + preemptible_share.blocks
        free_blocks -= (num_ahead + 1) * self._cache.blocks_for(int(mean_tokens))
        if num_ahead < len(self._batch.free_slots) + preemptible_share.slots and free_blocks >= 0:
            return prompts_ms, False
        # When it begins all other places are taken, on the average by those half done.
        mean_ms = load.waiting_ms / waiting
        begin_ms = load.running_ms + ahead_ms - (load.rows - 1) * mean_ms / 2
        wait_ms = max(begin_ms, prompts_ms, 0.0)
        return self._overtaking.extended_ms(wait_ms, delay_ms), True

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
        """Return the time to compute `num` such prompts, one after the other.

        Beside running requests, of which num_back pause.
        """
        if end <= start or not num:
            return 0.0
        span_ms = num * self._speed.span_ms(start, end)
        num_beside = len(self._batch.active) - num_back
        if not num_beside:
            num_steps = math.ceil(num * (end - start) / self._limits.max_num_batched_tokens)
            return span_ms + num_steps * self._speed.now.fixed_ms
        num_plans = self._num_plans(num_beside)
        beside_ms = self._round_ms(num_beside, num_beside * load.depth) / num_plans
        step_tokens = max(self._limits.max_num_batched_tokens - num_beside // num_plans, 1)
        parts = float(math.ceil(num * (end - start) / step_tokens))
        if is_long and not num_back:
            parts = max(parts, span_ms / (LONG_SHARE * beside_ms))
        if self._limits.tpot_target_ms:
            target_ms = self._limits.tpot_target_ms / num_plans
            room_ms = max(target_ms - beside_ms, 0.1 * beside_ms)
            parts = max(parts, span_ms / room_ms)
        return span_ms + parts * beside_ms

    def _num_plans(self, num_rows: int) -> int:
        """Return over how many plans the rows that generate are divided: see MicroBatches."""
        return max(min(self._limits.micro_batches, num_rows), 1)

    def _round_ms(self, num_rows: int, positions: float) -> float:
        """Return the time in which each of `num_rows` rows computes a token. positions: that all of
        them attend to."""
        num_plans = self._num_plans(num_rows)
        return num_plans * self._speed.step_ms(num_rows / num_plans, positions / num_plans)
