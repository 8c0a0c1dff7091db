"""Scheduler: turns requests into step plans, and step results into outputs.

The only interface of the package: add, abort, schedule, update. Knows no tensors, no text, no
executor and no clock: time is an argument.

A step hands out its budget to the running requests, then admits waiting ones in the policy's order;
extensions (backpressure, tenant ceilings, priority preemption, beams, layered chunks) take part
through the hooks of StepExtension. Up to `plans_in_flight` plans may be out: a row is scheduled
although its token is still being sampled, because the worker will know the token. Results are
applied in order of step; those of requests that ended meanwhile are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.base.block_copies import CopiesEnded, Tier
from quire.base.cache_usage import CacheReport
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import InvalidParameter
from quire.base.records import (
    FinishReason,
    Request,
    RequestOutput,
    StepOutputs,
    StepPlan,
    StepResult,
)
from quire.cache.explain import report_of
from quire.cache.manager import CacheManager
from quire.scheduler.interfaces import DraftSource, Gate
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.plan_builder import PlanBuilder, Step
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.snapshot import engine_snapshot
from quire.scheduler.step_budget import CostModel, StepBudget
from quire.scheduler.step_history import PACK_STEPS
from quire.scheduler.timeline import TimelineQuery
from quire.scheduler.wiring import (
    Expired,
    Policy,
    RestoreMode,
    SpeedEstimate,
    TenantLimits,
    check_objectives,
    check_queue_room,
    check_request,
    wire,
)

# Reserved blocks are counted for metrics only, and at most so often.
RESERVED_EVERY_MS = 500.0


class Scheduler:
    """One per engine. Lays out the tables of `cache`, which must be fresh.

    cost: needed where limits.step_budget_ms is set.
    speed: initial prices of steps; it learns with each update, and all predictions come from it.
    tenants: all there are; none: there is one, whatever requests call it. restore_mode: when blocks
    are loaded from a tier. draft_source: proposes tokens for requests that speculate; None: none
    are proposed.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        policy: Policy,
        *,
        cost: CostModel | None = None,
        speed: SpeedEstimate | None = None,
        tenants: Sequence[TenantLimits] = (),
        restore_mode: RestoreMode = RestoreMode.CHEAPER,
        draft_source: DraftSource | None = None,
    ) -> None:
        self.speed = SpeedEstimate() if speed is None else speed
        parts = wire(limits, cache, policy, cost, self.speed, tenants, restore_mode, draft_source)
        self._limits, self._cache, self._policy, self._cost = limits, cache, policy, cost
        self._batch, self._tenants = parts.batch, parts.shares
        self._requests, self._queue = parts.requests, parts.requests.queue
        self.history, self.hand_overs = parts.requests.history, parts.hand_overs
        self._advance, self._prompts, self._layered = parts.advance, parts.prompts, parts.layered
        self._admitter, self._slot_allocator = parts.admitter, parts.slot_allocator
        self._outcomes, self._expiry = parts.outcomes, parts.expiry
        self._beams, self._backpressure = parts.beams, parts.backpressure
        self._preemptor, self._kv_loads = parts.preemptor, parts.kv_loads
        self._extensions, self._drafts = parts.extensions, parts.drafts
        self._background, self.continued = parts.background, parts.continued
        self.lengths, self.predictor = parts.lengths, parts.predictor
        self._num_arrivals = 0
        self._last_plan: StepPlan | None = None  # the last that was updated
        self._last_step_ms = 0.0
        self._steps_ended = 0
        self._busy_ms = 0.0  # during which a plan was out
        self._reserved: tuple[float, int] = (-math.inf, 0)  # when it was counted, and how many
        self._was_busy = False  # since the last update: a step could follow it at once

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a plan is out, or blocks could be saved to a tier."""
        if self._requests.sequences or len(self._requests.in_flight):
            return True
        return self._cache.tiers is not None and self._cache.tiers.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextTooLong for one that can never fit, OverloadedError while the queue is
        full, DeadlineMissed for one that would miss its deadline or its first token's objective,
        InvalidParameter for an empty prompt, no room for output, an id in use, or a group
        of more streams than an idle engine takes.
        """
        requests, limits = self._requests, self._limits
        if request.request_id in requests.sequences:
            raise InvalidParameter(
                f"request id {request.request_id!r} is in use; ids of live requests must differ",
                param="request_id",
            )
        limit = requests.token_limit(request)
        if limit is None:
            limit = check_request(request, limits, self._cache, self._tenants)
        if len(self._queue) >= limits.max_queued_requests or limits.max_queued_tokens:
            num_free = len(self._batch.free_slots)
            check_queue_room(limits, self.predictor, self._queue, num_free, request)
        self._tenants.check_queue(request, self.predictor.retry_after_s)
        sequence = SequenceState(request, self._num_arrivals, limit, request.known_ids)
        self._num_arrivals += 1
        if request.speculation is not None and self._drafts is not None:
            self._drafts.note(sequence)
        if request.background:
            self._background.note(sequence)
            self.add_gate(self._background)
        waiting = requests.add(sequence)
        has_objective = request.deadline_ms is not None or request.ttft_slo_ms is not None
        if waiting is sequence:
            if has_objective:
                now_ms = max(self._last_step_ms, request.arrival_ms)
                missed = check_objectives(
                    sequence, self._queue, self.predictor, now_ms, self._cache, self._batch
                )
                if missed is not None:
                    requests.withdraw(sequence)
                    raise missed
            if self._policy.has_delays:
                self.predictor.note(sequence)
        if has_objective or limits.queue_timeout_ms:
            self._expiry.note(sequence, waiting)
        if len(request.output_ids) and self.continued is not None:
            self.continued.note(sequence)

    def predict_ttft_ms(self, request_id: str) -> float | None:
        """Return the predicted time from a waiting request's arrival to its first token.

        Without a margin. None for any other request, and before a few steps were timed.
        """
        sequence = self._requests.sequences.get(request_id)
        if sequence is None or sequence.slot != NO_SLOT or sequence.is_held:
            return None
        if not self.predictor.knows:
            return None
        at_ms = max(self._last_step_ms, sequence.request.arrival_ms)
        num_ahead = self._queue.num_before(sequence)
        prediction = self.predictor.first_token(sequence, num_ahead, at_ms)
        return at_ms - sequence.request.arrival_ms + prediction.ms

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is not live."""
        sequence = self._requests.sequences.get(request_id)
        if sequence is None:
            return None
        self._requests.abort(sequence)
        return sequence.output(finish_reason=FinishReason.ABORT)

    def ids_that_begin(self, prefix: str) -> list[str]:
        """Return the ids of live requests that begin with `prefix`."""
        return [id_ for id_ in self._requests.sequences if id_.startswith(prefix)]

    def add_gate(self, gate: Gate) -> None:
        """Add a further reason for requests to wait; no effect if it is there."""
        self._admitter.add_gate(gate)

    def hold(self, request_id: str, *, is_held: bool, now_ms: float | None = None) -> None:
        """Pause a request because its client reads too slowly, or let it go on.

        Ids that are not live are ignored. now_ms: None: the time of the last step.
        """
        sequence = self._requests.sequences.get(request_id)
        if sequence is None:
            return
        if now_ms is not None:
            self._requests.now_ms = now_ms
        if is_held:
            self._backpressure.hold(sequence)
        else:
            self._backpressure.release(sequence)

    def hold_client(self, prefix: str, *, is_held: bool, now_ms: float) -> None:
        """Pause the requests of a client that reads nothing, or let those that this has paused go
        on. prefix: of their ids."""
        self._requests.now_ms = now_ms
        self._backpressure.hold_client(prefix, self._requests.sequences, is_held=is_held)

    def expire(self, now_ms: float) -> list[Expired]:
        """End requests that waited too long for their first step, or missed their deadline.

        Returns their ids, with the error to report. A group of which any request has begun is past
        waiting.
        """
        return self._expiry.expire(now_ms) if self._expiry.is_active else []

    def schedule(self, now_ms: float) -> StepPlan | None:
        """Return the next plan; None if there is nothing to compute, or not before an update."""
        requests, batch, tiers = self._requests, self._batch, self._cache.tiers
        in_flight, requests.now_ms = requests.in_flight, now_ms
        if len(in_flight) >= self._limits.plans_in_flight:
            return None
        builder = PlanBuilder(in_flight.step + 1)
        step = Step(builder=builder, budget=self._budget(), now_ms=now_ms)
        if self._cache.window:
            self._drop_behind()
        self._tenants.changed()
        for extension in self._extensions:
            if extension.is_active:
                extension.begin_step(step)
        if len(batch.active):
            self._advance.advance(step, step.paused + step.deferred)
        if requests.admission_is_due and len(self._queue):
            self._admit(step)
        if step.yielding:
            self._prompts.advance_yielding(step, self._cache, self._tenants)
        for extension in self._extensions:
            if extension.is_active:
                extension.end_step(step)
        if not builder.has_rows and len(batch.active):  # the first by key always advances
            step.budget = self._budget()
            self._advance.advance(step, step.paused, by_key=True)
        idle = not builder.has_rows
        if tiers is not None:
            builder.set_tier_copies(tiers.take_copies(idle=idle))
        if idle and builder.is_empty:
            if not len(in_flight):
                self._was_busy = False
            return None
        return in_flight.send(builder.finish(requests.take_retired()), now_ms)

    def update(self, plan: StepPlan, result: StepResult, now_ms: float) -> StepOutputs:
        """Apply the result of the oldest plan in flight.

        Raises WorkerError if `result` does not answer it: then the engine cannot go on.
        """
        requests = self._requests
        outcome, began_ms = requests.in_flight.land(plan, result)
        requests.now_ms = now_ms
        submitted_ms = began_ms
        self._busy_ms += max(now_ms - max(began_ms, self._last_step_ms), 0.0)
        if not result.errors and plan.slots.size:
            num_scores = len(result.scores.ranks) if result.scores is not None else 0
            # While there is work, what the host does between two steps is part of the second.
            if self._was_busy or began_ms < self._last_step_ms:
                began_ms = self._last_step_ms
            ms, num_heads = now_ms - began_ms, len(result.token_ids) + num_scores
            drafts = self._drafts
            if drafts is not None and plan.step >= drafts.noted_from:
                ms = drafts.took(plan, ms, follows=submitted_ms < self._last_step_ms)
            self.speed.note(plan, num_heads, ms)
        if self._cache.settle(plan.step):
            requests.admission_is_due = True
        self._last_plan, self._last_step_ms = plan, now_ms
        self._steps_ended += 1
        outputs = self._outcomes.apply(plan, result, outcome, now_ms)
        counts, sample_counts = plan.counts, plan.sample_counts
        if plan.draft_ids.size and self._drafts is not None:
            rejected = self._drafts.rejected
            counts, sample_counts = counts - rejected, sample_counts - rejected
        noted = (plan.slots, plan.starts, counts, sample_counts, plan.layers)
        self.history.recent.append((plan.step, submitted_ms, now_ms, *noted))
        if not plan.step % PACK_STEPS:
            self.history.pack()
        self._was_busy = bool(requests.sequences)
        return outputs

    def copies_ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Note that blocks have reached a tier, or come from one."""
        self._kv_loads.ended(copies, now_ms)
        self._requests.admission_is_due = True

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        last, cache, slots = self._last_plan, self._cache, self._slot_allocator
        pins = slots.pins
        num_running, num_free = len(self._batch.active), cache.num_free
        in_flight, drafts = self._requests.in_flight, self._drafts
        return EngineStats(
            running=num_running,
            waiting=len(self._queue),
            waiting_tokens=self._queue.num_tokens,
            tenant_running=tuple(self._tenants.running),
            tenant_waiting=tuple(self._tenants.waiting),
            tenant_blocks=self._tenants.reported_blocks(self._last_step_ms),
            blocks_total=cache.num_blocks,
            blocks_used=cache.num_blocks - num_free,
            blocks_cached=cache.num_free_findable,
            blocks_free=num_free,
            blocks_reserved=self._reserved_blocks(),
            allocated_blocks_total=cache.allocated_blocks_total,
            block_allocation_ms_total=cache.allocation_ns_total / 1e6,
            steps_total=self._steps_ended,
            device_busy_ms_total=self._busy_ms,
            step_rows=len(last.slots) + (last.layers is not None) if last else 0,
            step_tokens=_tokens_of(last) if last else 0,
            layered_tokens_total=self._layered.tokens_total,
            prefix_queried_tokens_total=slots.queried_tokens_total,
            prefix_hit_tokens_total=slots.hit_tokens_total,
            prefix_hit_host_tokens_total=slots.tier_hit_tokens_total[Tier.HOST],
            prefix_hit_disk_tokens_total=slots.tier_hit_tokens_total[Tier.DISK],
            **self._preemptor.stats.fields,
            **(pins.counts(self._last_step_ms) if pins.is_active else pins.fields),
            **({} if cache.tiers is None else self._kv_loads.stats()),
            watermark_blocks=self._preemptor.watermark.blocks(num_running, in_flight.step),
            held=len(self._backpressure.held) if self._backpressure.is_active else 0,
            held_total=self._backpressure.num_held_total,
            row_errors_total=self._outcomes.row_errors,
            proposer="" if drafts is None else drafts.proposer,
            **({} if drafts is None or not drafts.was_used else drafts.fields),
            last_step_ms=self._last_step_ms,
        )

    @property
    def num_never_used_blocks(self) -> int:
        """How many of the pool's last blocks were never allocated."""
        return self._cache.num_never_used

    def cache_report(self, *, num_prefixes: int) -> CacheReport:
        """Return what the prefix cache holds, with the prefixes that saved most tokens."""
        return report_of(
            self._cache,
            queried_tokens_total=self._slot_allocator.queried_tokens_total,
            hit_tokens_total=self._slot_allocator.hit_tokens_total,
            tier_hit_tokens_total=self._slot_allocator.tier_hit_tokens_total,
            num_prefixes=num_prefixes,
        )

    def snapshot(self, now_ms: float) -> EngineSnapshot:
        """Return the queue, the running batch and the KV blocks as of now."""
        return engine_snapshot(
            self._batch,
            self._requests,
            self._cache,
            limits=self._limits,
            speed=self.speed,
            steps_total=self._steps_ended,
            held_total=len(self._backpressure.held) if self._backpressure.is_active else 0,
            now_ms=now_ms,
        )

    def query_timelines(self, prefixes: Sequence[str]) -> TimelineQuery:
        """Return the timelines of requests, live or ended, with ids that begin with a prefix."""
        parts = (self._requests, self._batch, self._cache, self.speed.now)
        return TimelineQuery(*parts, prefixes)

    def flush_cache(self) -> int:
        """Make nothing computed until now findable; return how many blocks were."""
        return self._cache.flush()

    def check_integrity(self, *, repair: bool = False, quick: bool = False) -> list[str]:
        """Return contradictions in the scheduler's and the cache's state, in words.

        quick: of KV blocks only, and cheap. See CacheManager.
        """
        if quick:
            return self._cache.check_integrity(repair=repair, quick=True)
        return [
            *self._batch.problems(),
            *self._beams.problems(),
            *self._tenants.problems(len(self._queue)),
            *self._cache.check_integrity(repair=repair),
        ]

    def _admit(self, step: Step) -> None:
        """Admit waiting requests, before the prompts that yield to them."""
        if len(self._batch.active):
            self._prompts.bound(step, len(self._queue), step.paused + step.deferred)
        before = self._policy.rank(step.yielding[0]) if step.yielding else None
        if step.has_room:
            self._requests.admission_is_due = self._admitter.admit(self._queue, step, before=before)
        elif self._tenants.any_floor_left():
            self._admitter.admit(self._queue, step, floors_only=True, before=before)

    def _drop_behind(self) -> None:
        """Give back blocks that no running request sees any more."""
        batch, active = self._batch, self._batch.active
        computed = batch.computed[active]
        if self._beams.is_active:
            computed = self._beams.computed_by_all(active, computed)
        if self._cache.drop_behind(active, computed, batch.tokens.tokens):
            self._requests.admission_is_due = True

    def _reserved_blocks(self) -> int:
        """Return the blocks that running requests lack for known tokens, at most 0.5 s old."""
        counted_ms, num_blocks = self._reserved
        if self._last_step_ms >= counted_ms + RESERVED_EVERY_MS or not len(self._batch.active):
            active = self._batch.active
            num_blocks = self._cache.blocks_lacking(active, self._batch.goal[active])
            self._reserved = (self._last_step_ms, num_blocks)
        return num_blocks

    def _budget(self) -> StepBudget:
        limits = self._limits
        return StepBudget(limits.max_num_batched_tokens, limits.step_budget_ms, self._cost)


def _tokens_of(plan: StepPlan) -> int:
    """Return the token rows of a plan; layers of a chunk count as their share of its tokens."""
    layers = plan.layers
    return plan.num_tokens + (0 if layers is None else round(layers.share * layers.count))
