"""Scheduler: from requests to plans, and from results to outputs.

Ties the parts together and is their only face: who lives (Roster), who is let in (Admissions), what
running requests get (Progress), who gives way (GivingWay), what results mean (Results), whose time
is over (Expiry). Knows no tensors, no text, no executor and no clock: time is an argument.

A step hands out its budget to the running requests, then admits waiting ones in the policy's
order. Up to `plans_in_flight` plans may be out: a row whose token is still
being sampled is scheduled all the same, because the worker will know the token. Results are
applied in order of step; those of requests that have ended meanwhile are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from quire.base.block_copies import CopiesEnded, Tier
from quire.base.cache_usage import CacheReport
from quire.base.errors import InvalidParameter
from quire.base.records import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    StepOutputs,
    StepPlan,
    StepResult,
)
from quire.cache.explain import report_of
from quire.cache.manager import CacheManager
from quire.scheduler.admission import Admissions
from quire.scheduler.budget import StepBudget
from quire.scheduler.cost import CostModel
from quire.scheduler.doors import broken_promise, check_room, limit_of
from quire.scheduler.draft import PlanDraft
from quire.scheduler.expiry import Expired, Expiry
from quire.scheduler.fetches import Fetches
from quire.scheduler.forecast import Forecast
from quire.scheduler.gate import Gate, GroupGate, LengthGate
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.groups import BeamGroups
from quire.scheduler.holding import Holding
from quire.scheduler.layered import LayeredParts
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.margin import Margin
from quire.scheduler.move_cost import Choice, MoveCost
from quire.scheduler.policy import Policy
from quire.scheduler.preemption_tally import PreemptionTally
from quire.scheduler.progress import NOBODY, Progress
from quire.scheduler.prompts import PromptShares
from quire.scheduler.results import Results
from quire.scheduler.roster import Roster
from quire.scheduler.seating import Seating
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks, TenantLimits
from quire.scheduler.ticket import NO_SLOT, Ticket
from quire.scheduler.victims import Victims
from quire.scheduler.watermark import Watermark
from quire.scheduler.yielding import NOBODY_BACK, StandsBack, Yielding

# Reserved blocks are counted for metrics only, and at most so often.
RESERVED_EVERY_MS = 500.0


class Scheduler:
    """One per engine. Lays out the tables of `cache`, which must be fresh.

    gates: further reasons to wait, beside that of forks. cost: needed where
    limits.step_budget_ms is set. speed: what is known of steps' times to begin with; it learns
    with each update, and is the one source for whoever must predict. tenants: all there are; none:
    there is one, whatever requests call it. tier_block_ms: what moving a block between the pool and
    a tier of `cache` is thought to take, until it is known; bring_back: when blocks are fetched.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheManager,
        policy: Policy,
        *,
        gates: Sequence[Gate] = (),
        cost: CostModel | None = None,
        speed: SpeedEstimate | None = None,
        tenants: Sequence[TenantLimits] = (),
        tier_block_ms: float = 1.0,
        bring_back: Choice = Choice.CHEAPER,
    ) -> None:
        if limits.step_budget_ms and cost is None:
            raise InvalidParameter(
                f"step_budget_ms is {limits.step_budget_ms} but there is no cost model; "
                "set it to 0 or give one",
                param="step_budget_ms",
            )
        cache.lay_out(num_slots=limits.max_num_seqs, max_tokens=limits.max_model_len)
        self._limits = limits
        self._cache = cache
        self._policy = policy
        self._cost = cost
        self.speed = SpeedEstimate() if speed is None else speed
        self.lengths = LengthHistory()
        self._state = state = RunningState(limits.max_num_seqs, limits.max_model_len)
        policy.begin(state, self.speed, self.lengths)
        self._tenants = tenant_books = TenantBooks(tenants, state, cache)
        self._beams = beams = BeamGroups(state, cache, policy, tenant_books)
        moving = (
            MoveCost(self.speed, cache.block_size, block_ms=tier_block_ms, choice=bring_back)
            if cache.tiers is not None
            else None
        )
        self._fetches = fetches = Fetches(cache, moving)
        self._roster = roster = Roster(
            limits, state, cache, policy, tenant_books, beams, fetches, self.lengths
        )
        self._queue = roster.queue
        self._watermark = Watermark(cache.num_blocks)
        self._tally = PreemptionTally()
        victims = Victims(policy, state, cache, self.speed, moving)
        self._giving_way = GivingWay(
            roster,
            state,
            cache,
            policy,
            tenant_books,
            beams,
            victims=victims,
            watermark=self._watermark,
            tally=self._tally,
        )
        self._yielding = Yielding(
            roster,
            state,
            cache,
            policy,
            tenant_books,
            giving_way=self._giving_way,
            victims=victims,
            watermark=self._watermark,
        )
        self._holding = Holding(roster, self._giving_way)
        self._layered = layered = LayeredParts(limits, state)
        self._prompts = PromptShares(limits, state, policy, self.speed, layered)
        self._progress = Progress(
            roster,
            state,
            cache,
            tenant_books,
            beams,
            giving_way=self._giving_way,
            prompts=self._prompts,
            layered=layered,
            fetches=fetches,
        )
        all_gates: list[Gate] = [fetches, GroupGate(), *gates]
        if limits.max_long_prompts or limits.max_short_prompts:
            all_gates.append(LengthGate(limits.max_long_prompts, limits.max_short_prompts))
        self._seating = Seating(
            state, cache, policy, tenant_books, fetches, self._tally, self.speed
        )
        self._admissions = Admissions(
            state,
            cache,
            policy,
            tenant_books,
            all_gates,
            beams,
            fetches=fetches,
            watermark=self._watermark,
            seating=self._seating,
        )
        margin = Margin()
        self._results = Results(roster, state, beams, self.lengths, margin)
        self.forecast = Forecast(
            limits,
            state,
            cache,
            self.speed,
            self.lengths,
            roster.queue,
            policy,
            self._yielding,
            margin,
        )
        self._expiry = Expiry(roster, self.forecast, limits.queue_timeout_ms)
        self._num_arrivals = 0
        self._last_plan: StepPlan | None = None  # the last that was updated
        self._last_step_ms = 0.0
        self._busy_ms = 0.0  # during which a plan was out
        self._reserved: tuple[float, int] = (-math.inf, 0)  # when it was counted, and how many
        self._was_busy = False  # since the last update: a step could follow it at once
        self._steps_ended = 0

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a plan is out, or blocks could be saved to a tier."""
        if self._roster.tickets or len(self._roster.flights):
            return True
        return self._cache.tiers is not None and self._cache.tiers.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextTooLong for one that can never fit, OverloadedError while the queue is
        full, DeadlineMissed for one that would miss its deadline or its first token's objective,
        InvalidParameter for an empty prompt, no room for output, an id in use, or a group
        of more streams than an idle engine takes.
        """
        if request.request_id in self._roster.tickets:
            raise InvalidParameter(
                f"request id {request.request_id!r} is in use; ids of live requests must differ",
                param="request_id",
            )
        limit = limit_of(request, self._limits, self._cache, self._tenants)
        num_free = len(self._state.free_slots)
        check_room(self._limits, self.forecast, self._queue, num_free, request)
        self._tenants.check_queue(request, self.forecast.retry_after_s)
        ticket = Ticket(
            request=request,
            arrival=self._num_arrivals,
            limit=limit,
            token_ids=np.ascontiguousarray(request.prompt_ids, np.int32),
        )
        self._num_arrivals += 1
        waiting = self._roster.come(ticket)
        if waiting is ticket:
            at_ms = max(self._last_step_ms, request.arrival_ms)
            broken = broken_promise(
                ticket, self._queue, self.forecast, at_ms, self._cache, self._state
            )
            if broken is not None:
                self._roster.withdraw(ticket)
                raise broken
        if waiting is ticket:
            self.forecast.note(ticket)
        self._expiry.note(ticket, waiting)

    def foretell_ms(self, request_id: str) -> float | None:
        """From its arrival to its first token, as predicted now for one that waits, without a
        margin; None for any other, and before a few steps were timed."""
        ticket = self._roster.tickets.get(request_id)
        if ticket is None or ticket.slot != NO_SLOT or not self.forecast.knows or ticket.is_held:
            return None
        at_ms = max(self._last_step_ms, ticket.request.arrival_ms)
        num_ahead = self._queue.num_before(ticket)
        foretold = self.forecast.first_token(ticket, num_ahead, at_ms)
        return at_ms - ticket.request.arrival_ms + foretold.ms

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is not here (any more)."""
        ticket = self._roster.tickets.get(request_id)
        if ticket is None:
            return None
        self._roster.abort(ticket)
        return ticket.output(finish_reason=FinishReason.ABORT)

    def ids_that_begin(self, prefix: str) -> list[str]:
        """The requests that are here and whose ids begin so."""
        return [id_ for id_ in self._roster.tickets if id_.startswith(prefix)]

    def hold(self, request_id: str, *, is_held: bool) -> None:
        """Its reader does not keep up: it gets no more steps until it is released. Ids that are
        not here (any more) are ignored."""
        ticket = self._roster.tickets.get(request_id)
        if ticket is None:
            return
        if is_held:
            self._holding.hold(ticket)
        else:
            self._holding.release(ticket)

    def expire(self, now_ms: float) -> list[Expired]:
        """End what has waited for its first step too long, or whose deadline is over: ids, and
        what to say. A group of which any has begun is past waiting.
        """
        return self._expiry.expire(now_ms)

    def schedule(self, now_ms: float) -> StepPlan | None:
        """The next plan; None if there is nothing to compute, or not before an update."""
        roster, state, tiers = self._roster, self._state, self._cache.tiers
        flights = roster.flights
        if len(flights) >= self._limits.plans_in_flight:
            return None
        draft, budget = PlanDraft(flights.step + 1), self._budget()
        if self._cache.window:
            self._drop_behind()
        self._tenants.changed()
        self._layered.begin_step()
        paused = self._holding.begin_step()
        if self._tenants.has_ceilings:
            paused += self._giving_way.keep_ceilings()
        had_room, behind, stands_back = True, NOBODY, NOBODY_BACK
        if self._policy.makes_way and (roster.may_admit or self._policy.hurried):
            paused, stands_back = self._yielding.begin_step(paused)
        left_out, is_hurried = paused + stands_back.slots, stands_back is not NOBODY_BACK
        if self._beams.running:
            had_room = self._progress.branch_beams(draft)
        if len(state.active):
            has_room, behind = self._progress.go_on(draft, budget, left_out, is_hurried=is_hurried)
            had_room &= has_room
        if roster.may_admit and len(self._queue):
            self._prompts.bound(budget, len(self._queue), left_out, is_hurried=is_hurried)
            self._admit(draft, budget, now_ms, behind, stands_back, had_room=had_room)
            roster.may_admit |= self._yielding.is_pending
        if behind:
            self._prompts.go_on_behind(draft, budget, behind, self._cache, self._tenants)
        if is_hurried and not stands_back.was_for(state):
            # Whom they made way for got nothing: they need not wait.
            self._progress.go_on(draft, budget, paused + stands_back.others(state))
        idle = not draft.has_rows
        if idle and len(state.active):  # nobody could go on: the first by key can
            self._progress.go_on(draft, self._budget(), paused, by_key=True)
            idle = not draft.has_rows
        if tiers is not None:
            draft.set_tier_copies(tiers.take_copies(idle=idle))
        if idle and draft.is_empty:
            if not len(flights):
                self._was_busy = False
            return None
        return flights.send(draft.finish(roster.take_retired()), now_ms)

    def update(self, plan: StepPlan, result: StepResult, now_ms: float) -> StepOutputs:
        """Apply the result of the oldest plan that is out.

        Raises WorkerError if `result` does not answer it: then the engine cannot go on.
        """
        landing, began_ms = self._roster.flights.land(plan, result)
        self._busy_ms += max(now_ms - max(began_ms, self._last_step_ms), 0.0)
        if not result.errors and plan.slots.size:
            num_scores = len(result.scores.ranks) if result.scores is not None else 0
            # While there is work, what the host does between two steps is part of the second.
            if self._was_busy or began_ms < self._last_step_ms:
                began_ms = self._last_step_ms
            self.speed.note(plan, len(result.token_ids) + num_scores, now_ms - began_ms)
        if self._cache.settle(plan.step):
            self._roster.may_admit = True
        self._last_plan, self._last_step_ms = plan, now_ms
        self._steps_ended += 1
        outputs = self._results.apply(plan, result, landing, now_ms)
        self._was_busy = bool(self._roster.tickets)
        return outputs

    def copies_ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Blocks have reached a tier, or come from one."""
        self._fetches.ended(copies, now_ms)
        self._roster.may_admit = True

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        last = self._last_plan
        return EngineStats(
            running=len(self._state.active),
            waiting=len(self._queue),
            waiting_tokens=self._queue.num_tokens,
            tenant_running=tuple(self._tenants.running),
            tenant_waiting=tuple(self._tenants.waiting),
            tenant_blocks=self._tenants.told_blocks(self._last_step_ms),
            blocks_total=self._cache.num_blocks,
            blocks_used=self._cache.num_blocks - self._cache.num_free,
            blocks_cached=self._cache.pool.num_free_findable,
            blocks_free=self._cache.num_free,
            blocks_reserved=self._reserved_blocks(),
            allocated_blocks_total=self._cache.pool.allocated_blocks_total,
            block_allocation_ms_total=self._cache.pool.allocation_ns_total / 1e6,
            steps_total=self._steps_ended,
            device_busy_ms_total=self._busy_ms,
            step_rows=len(last.slots) + (last.layers is not None) if last else 0,
            step_tokens=_tokens_of(last) if last else 0,
            layered_tokens_total=self._layered.tokens_total,
            prefix_queried_tokens_total=self._seating.queried_tokens_total,
            prefix_hit_tokens_total=self._seating.hit_tokens_total,
            prefix_hit_host_tokens_total=self._seating.tier_hit_tokens_total[Tier.HOST],
            prefix_hit_disk_tokens_total=self._seating.tier_hit_tokens_total[Tier.DISK],
            **self._tally.stats(),
            **self._fetches.stats(),
            watermark_blocks=self._watermark.blocks(
                len(self._state.active), self._roster.flights.step
            ),
            held=self._holding.num_held,
            held_total=self._holding.num_held_total,
            row_errors_total=self._results.row_errors,
            last_step_ms=self._last_step_ms,
        )

    @property
    def num_never_used_blocks(self) -> int:
        """So many of the pool's last blocks were never handed out."""
        return self._cache.num_never_used

    def cache_report(self, *, num_prefixes: int) -> CacheReport:
        """What the prefix cache holds, with the prefixes that spared most tokens."""
        return report_of(
            self._cache,
            queried_tokens_total=self._seating.queried_tokens_total,
            hit_tokens_total=self._seating.hit_tokens_total,
            tier_hit_tokens_total=self._seating.tier_hit_tokens_total,
            num_prefixes=num_prefixes,
        )

    def flush_cache(self) -> int:
        """Nothing computed until now is found again; how many blocks were findable."""
        return self._cache.flush()

    def check_integrity(self, *, repair: bool = False, quick: bool = False) -> list[str]:
        """Contradictions in the books, in words; none if all agree. quick: of KV blocks only, and
        cheap. See CacheManager."""
        if quick:
            return self._cache.check_integrity(repair=repair, quick=True)
        return [
            *self._state.problems(),
            *self._beams.problems(),
            *self._tenants.problems(len(self._queue)),
            *self._cache.check_integrity(repair=repair),
        ]

    def _admit(
        self,
        draft: PlanDraft,
        budget: StepBudget,
        now_ms: float,
        behind: list[Ticket],
        stands_back: StandsBack,
        *,
        had_room: bool,
    ) -> None:
        """Waiting requests may begin, before the prompts that stepped back `behind` them."""
        before = self._policy.rank(behind[0]) if behind else None
        admit = partial(self._admissions.admit, before=before, stands_back=stands_back)
        if had_room:
            self._roster.may_admit = admit(self._queue, draft, budget, now_ms)
        elif self._tenants.someone_has_floor_left():
            admit(self._queue, draft, budget, now_ms, floors_only=True)

    def _drop_behind(self) -> None:
        """Blocks that no running request sees any more are given back."""
        state, active = self._state, self._state.active
        if self._cache.drop_behind(active, state.computed[active], state.tokens.tokens):
            self._roster.may_admit = True

    def _reserved_blocks(self) -> int:
        """Blocks that running requests lack for known tokens, counted at most twice a second."""
        counted_ms, num_blocks = self._reserved
        if self._last_step_ms >= counted_ms + RESERVED_EVERY_MS or not len(self._state.active):
            active = self._state.active
            short = self._cache.blocks_short(active, self._state.goal[active])
            num_blocks = int(np.add.reduce(short))
            self._reserved = (self._last_step_ms, num_blocks)
        return num_blocks

    def _budget(self) -> StepBudget:
        limits = self._limits
        return StepBudget(limits.max_num_batched_tokens, limits.step_budget_ms, self._cost)


def _tokens_of(plan: StepPlan) -> int:
    """Token rows; some layers of a part are as large a share of its tokens."""
    layers = plan.layers
    return plan.num_tokens + (0 if layers is None else round(layers.share * layers.count))
