"""Scheduler: from requests to plans, and from results to outputs.

Ties the queue, the running state, the cache and the policy together; the only file that sees
all of them. Knows no tensors, no text, no executor and no clock: time is an argument.

A step hands out its budget to the running requests, then admits waiting ones in the policy's
order. Up to `plans_in_flight` plans may be out: a row whose token is still
being sampled is scheduled all the same, because the worker will know the token. Results are
applied in order of step; those of requests that have ended meanwhile are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.base.block_copies import CopiesEnded
from quire.base.cache_use import CacheReport
from quire.base.errors import (
    InvalidParameter,
    OverloadedError,
    WorkerError,
)
from quire.base.records import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    RowError,
    StepOutputs,
    StepPlan,
    StepResult,
)
from quire.cache.explain import report_of
from quire.cache.manager import CacheManager
from quire.scheduler.admission import Admissions
from quire.scheduler.budget import StepBudget
from quire.scheduler.cost import CostModel
from quire.scheduler.deadlines import Deadlines
from quire.scheduler.doors import broken_promise, check_room, deadline_passed, limit_of
from quire.scheduler.draft import PlanDraft
from quire.scheduler.fetches import Fetches
from quire.scheduler.flight import Flight
from quire.scheduler.forecast import Forecast
from quire.scheduler.gate import Gate, GroupGate, LengthGate
from quire.scheduler.groups import BeamGroup, BeamGroups
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.move_cost import Choice, MoveCost
from quire.scheduler.outputs import Event, make_outputs
from quire.scheduler.policy import Policy
from quire.scheduler.preemption import make_room
from quire.scheduler.preemption_tally import PreemptionTally, Why
from quire.scheduler.prompts import PromptShares
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.queue_time import QueueTime
from quire.scheduler.scores import keep_scores
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.tenants import TenantBooks, TenantLimits
from quire.scheduler.ticket import NO_SLOT, Ticket
from quire.scheduler.victims import Victims
from quire.scheduler.watermark import Watermark

NOBODY: list[Ticket] = []


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
        self._state = RunningState(limits.max_num_seqs, limits.max_model_len)
        self._tenants = TenantBooks(tenants, self._state, cache)
        self._beams = BeamGroups(self._state, cache, policy, self._tenants)
        moving = (
            MoveCost(self.speed, cache.block_size, block_ms=tier_block_ms, choice=bring_back)
            if cache.tiers is not None
            else None
        )
        self._fetches = Fetches(cache, moving)
        self._victims = Victims(policy, self._state, cache, self.speed, moving)
        self._watermark = Watermark(cache.num_blocks)
        self._tally = PreemptionTally()
        all_gates: list[Gate] = [self._fetches, GroupGate(), *gates]
        if limits.max_long_prompts or limits.max_short_prompts:
            all_gates.append(LengthGate(limits.max_long_prompts, limits.max_short_prompts))
        self._admissions = Admissions(
            self._state,
            cache,
            policy,
            self._tenants,
            all_gates,
            self._beams,
            fetches=self._fetches,
            watermark=self._watermark,
            tally=self._tally,
            speed=self.speed,
        )
        self.lengths = LengthHistory()
        policy.begin(self._state, self.speed, self.lengths)
        self._prompts = PromptShares(limits, self._state, policy, self.speed)
        self._queue = WaitingQueue(policy)
        self._queue_time = QueueTime(limits.queue_timeout_ms)
        self._deadlines = Deadlines()
        self.forecast = Forecast(limits, self._state, cache, self.speed, self.lengths, self._queue)
        self._tickets: dict[str, Ticket] = {}
        self._leaders: dict[str, Ticket] = {}  # by group
        self._flights: deque[Flight] = deque()
        self._retired: list[int] = []  # slots given back since the last plan
        # Whether an admission may succeed: set by events, so that a blocked queue costs nothing.
        self._may_admit = False
        self._step = 0
        self._num_arrivals = 0
        self._last_plan: StepPlan | None = None  # the last that was updated
        self._last_step_ms = 0.0
        self._steps_ended = self._row_errors = 0

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a plan is out, or blocks could be saved to a tier."""
        if self._tickets or self._flights:
            return True
        return self._cache.tiers is not None and self._cache.tiers.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ContextTooLong for one that can never fit, OverloadedError while the queue is
        full, DeadlineMissed for one that would miss its deadline or its first token's objective,
        InvalidParameter for an empty prompt, no room for output, an id in use, or a group
        of more streams than an idle engine takes.
        """
        if request.request_id in self._tickets:
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
        self._tickets[request.request_id] = ticket
        self._deadlines.note(ticket)
        if request.sampling.use_beam_search:
            first = self._beams.join(ticket)
            if first is not None:
                self._queue_time.note(first)
                self._enqueue(first)
            return
        leader = self._leaders.get(request.group_id)
        if leader is None:  # the first of its group
            self._leaders[request.group_id] = ticket
        else:
            ticket.leader = leader
            leader.forks.append(ticket)
        self._enqueue(ticket)
        late_ms = max(self._last_step_ms - request.arrival_ms, 0.0)
        broken = broken_promise(
            ticket, self._queue, self.forecast, late_ms, self._cache, self._state
        )
        if broken is not None:
            self._unqueue(ticket)
            self._forget(ticket)
            raise broken
        self._queue_time.note(ticket)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, wherever it is; None if it is not here (any more)."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return None
        if ticket.beams is not None:
            self._leave_beams(ticket, ticket.beams)
        elif ticket.slot == NO_SLOT:
            self._unqueue(ticket)
            self._forget(ticket)
        else:
            self._end_all([ticket])
        return ticket.output(finish_reason=FinishReason.ABORT)

    def expire(self, now_ms: float) -> list[tuple[tuple[str, ...], OverloadedError]]:
        """End what has waited for its first step too long, or whose deadline is over: ids, and
        what to say. A group of which any has begun is past waiting.
        """
        expired: list[tuple[tuple[str, ...], OverloadedError]] = []
        for ticket, is_whole in self._deadlines.passed(now_ms):
            if is_whole:
                error = deadline_passed(ticket, self.forecast)
                self.abort(ticket.request.request_id)
                expired.append(((ticket.request.request_id,), error))
            elif (
                ticket.beams is None
                and ticket.slot == NO_SLOT
                and math.isnan(ticket.first_token_ms)
            ):
                ticket.missed_first_token = True
                self._unqueue(ticket)
                self._enqueue(ticket)
        for ticket in self._queue_time.overdue(now_ms):
            if not ticket.alive:  # with its group
                continue
            if ticket.beams is not None:
                streams = self._forget_beams(ticket.beams)
                error = self._queue_time.error(ticket, now_ms, retry_after_s=None)
                expired.append((tuple(one.request.request_id for one in streams), error))
                continue
            leader = ticket.leader or ticket
            group = (leader, *leader.forks)
            if any(one.was_admitted for one in group):
                continue
            group = tuple(one for one in group if one.alive)
            for one in reversed(group):  # the leader last: nobody is to take its place
                self._unqueue(one)
                self._forget(one)
            retry_after_s = self.forecast.retry_after_s()
            timed_out = self._queue_time.error(ticket, now_ms, retry_after_s=retry_after_s)
            expired.append((tuple(one.request.request_id for one in group), timed_out))
        return expired

    def schedule(self, now_ms: float) -> StepPlan | None:
        """The next plan; None if there is nothing to compute, or not before an update."""
        if len(self._flights) >= self._limits.plans_in_flight:
            return None
        draft, budget = PlanDraft(self._step + 1), self._budget()
        self._tenants.changed()
        paused = self._keep_ceilings() if self._tenants.has_ceilings else []
        had_room, behind = True, NOBODY
        if self._beams.running:
            had_room = self._branch_beams(draft)
        if len(self._state.active):
            has_room, behind = self._go_on(draft, budget, paused)
            had_room &= has_room
        if self._may_admit and len(self._queue):
            self._prompts.bound(budget, len(self._queue))
            before, admit = self._policy.rank(behind[0]) if behind else None, self._admissions.admit
            if had_room:
                self._may_admit = admit(self._queue, draft, budget, now_ms, before=before)
            elif self._tenants.someone_has_floor_left():
                admit(self._queue, draft, budget, now_ms, floors_only=True, before=before)
        if behind:
            self._prompts.go_on_behind(draft, budget, behind, self._cache)
        idle = not draft.has_rows
        if idle and len(self._state.active):  # nobody could go on: the first by key can
            self._go_on(draft, self._budget(), paused, by_key=True)
            idle = not draft.has_rows
        if self._cache.tiers is not None:
            draft.set_tier_copies(self._cache.tiers.take_copies(idle=idle))
        if idle and draft.is_empty:
            return None
        self._step += 1
        flight = draft.finish(self._retired)
        self._retired = []
        flight.began_ms = now_ms
        self._flights.append(flight)
        return flight.plan

    def update(self, plan: StepPlan, result: StepResult, now_ms: float) -> StepOutputs:
        """Apply the result of the oldest plan that is out.

        Raises WorkerError if `result` does not answer it: then the engine cannot go on.
        """
        if not self._flights or self._flights[0].plan is not plan:
            raise WorkerError(
                f"step {plan.step} was updated out of order; the oldest plan that is out is "
                f"{self._flights[0].plan.step if self._flights else 'none'}"
            )
        landing = self._flights[0].land(result)
        began_ms = max(self._flights.popleft().began_ms, self._last_step_ms)
        if not result.errors and plan.slots.size:
            num_scores = len(result.scores.ranks) if result.scores is not None else 0
            self.speed.note(plan, len(result.token_ids) + num_scores, now_ms - began_ms)
        if self._cache.settle(plan.step):
            self._may_admit = True
        self._last_plan, self._last_step_ms = plan, now_ms
        self._steps_ended += 1

        state, index, entries = self._state, landing.sampled, landing.entries
        state.computed[landing.index] = landing.ends
        keep_scores(plan, result, landing.rows, state.ticket)
        scored = state.done_without_output(landing.index, landing.ends)
        ids = result.token_ids if entries is None else result.token_ids[entries]
        lengths = state.append(index, ids, now_ms)
        if len(result.mirostat_mus):
            mus = result.mirostat_mus
            state.mirostat_mus[index] = mus if entries is None else mus[entries]
        stops = state.hits_stop(index, ids)
        has_event = stops | (lengths >= state.next_event[index])
        if not (np.count_nonzero(has_event) or landing.errors or scored):
            return make_outputs(result, entries, None, state.request_ids(index), [], [])
        plain = (~has_event).nonzero()[0]
        request_ids = state.request_ids(index[plain])
        found = self._beams.take(index, has_event.nonzero()[0], result, entries, now_ms)
        events = self._events(index, lengths, stops, has_event, now_ms)
        ended = self._fail(landing.errors, plan) + self._end_scored(scored, now_ms)
        ended += [output for group in found for output in self._end_beams(group, now_ms)]
        finished = [event.ticket for event in events if event.finish_reason is not None]
        for ticket in finished:
            num_tokens = int(state.tokens.lengths[ticket.slot]) - ticket.num_prompt_tokens
            self.lengths.note(ticket.request, num_tokens)
        self._end_all(finished)
        return make_outputs(result, entries, plain, request_ids, events, ended)

    def copies_ended(self, copies: CopiesEnded, now_ms: float) -> None:
        """Blocks have reached a tier, or come from one."""
        self._fetches.ended(copies, now_ms)
        self._may_admit = True

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
            steps_total=self._steps_ended,
            step_rows=len(last.slots) if last else 0,
            step_tokens=last.num_tokens if last else 0,
            prefix_queried_tokens_total=self._admissions.queried_tokens_total,
            prefix_hit_tokens_total=self._admissions.hit_tokens_total,
            prefix_hit_disk_tokens_total=self._admissions.disk_hit_tokens_total,
            **self._tally.stats(),
            **self._fetches.stats(),
            watermark_blocks=self._watermark.blocks(len(self._state.active), self._step),
            row_errors_total=self._row_errors,
            last_step_ms=self._last_step_ms,
        )

    def cache_report(self, *, num_prefixes: int) -> CacheReport:
        """What the prefix cache holds, with the prefixes that spared most tokens."""
        return report_of(
            self._cache,
            queried_tokens_total=self._admissions.queried_tokens_total,
            hit_tokens_total=self._admissions.hit_tokens_total,
            disk_hit_tokens_total=self._admissions.disk_hit_tokens_total,
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

    def _keep_ceilings(self) -> list[int]:
        """Preempt the last requests of tenants that have grown beyond their ceilings.

        Returns slots that are in flight: they are left out of this step, and preempted then.
        """
        paused: list[int] = []
        for tenant, slots in self._tenants.above_ceilings():
            served = slots[self._order_of(slots)]
            served = served[self._beams.one_each(served)]
            for slot in self._policy.victims(served[1:]).tolist():
                if not self._tenants.is_above_ceiling(tenant):
                    break
                if self._last_steps(np.array([slot]))[0]:
                    paused.append(slot)
                else:
                    self._preempt(slot, Why.CEILING)
        return paused

    def _budget(self) -> StepBudget:
        limits = self._limits
        return StepBudget(limits.max_num_batched_tokens, limits.step_budget_ms, self._cost)

    def _go_on(
        self, draft: PlanDraft, budget: StepBudget, paused: list[int], *, by_key: bool = False
    ) -> tuple[bool, list[Ticket]]:
        """Schedule the running requests but those paused; whether there were blocks enough, and
        whose prompts stepped back behind waiting ones. by_key: strictly in the order of keys."""
        state, cache = self._state, self._cache
        index, slots = state.active, state.active_slots
        if paused:
            goes_on = ~np.isin(index, paused)
            index, slots = index[goes_on], slots[goes_on]
        starts, goals = state.scheduled[index], state.goal[index]
        scored = state.still_scored(index, starts)
        wanted, behind = goals - starts, NOBODY
        if by_key:
            order, counts = self._order_of(index), np.zeros(len(index), np.int32)
            of_scored = None if scored is None else scored[order]
            counts[order] = budget.hand_out(starts[order], wanted[order], of_scored)
        elif np.count_nonzero(wanted > 1):
            num_waiting = len(self._queue)
            first = self._queue.first if self._may_admit and num_waiting else None
            shares = self._prompts.hand_out(
                budget, index, starts, wanted, scored, first, num_waiting
            )
            counts, behind = shares.counts, [state.ticket(int(index[r])) for r in shares.behind]
        else:
            counts = budget.hand_out(starts, wanted, scored)
        ends = starts + counts
        had_room, goes_on = True, counts > 0
        over = (ends > cache.capacities[index]).nonzero()[0]
        if len(over):
            needs = cache.blocks_short(index[over], ends[over])
            had_room = self._tenants.can_grow(index[over], needs) or (
                self._fetches.let_go() and self._tenants.can_grow(index[over], needs)
            )
            if not had_room:
                may = self._make_room(index, over, needs)
                budget.give_back(
                    starts[~may], counts[~may], None if scored is None else scored[~may]
                )
                goes_on &= may
                over, needs = over[may[over]], needs[may[over]]
                behind = [ticket for ticket in behind if ticket.slot != NO_SLOT]
            if len(over):
                draft.add_deltas(cache.allocate(index[over], needs))
        num_rows = np.count_nonzero(goes_on)
        if num_rows < len(index):
            index, slots, starts = index[goes_on], slots[goes_on], starts[goes_on]
            goals, counts, ends = goals[goes_on], counts[goes_on], ends[goes_on]
        if num_rows:
            samples = state.schedule(index, ends, goals)
            store_from = np.maximum(starts, state.stored[index])
            draft.add_rows(index, slots, starts, counts, ends, store_from, samples)
        return had_room, behind

    def _make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Which of the rows may go on, after preempting others; served in the policy's order."""
        state = self._state
        all_needs = np.zeros(len(index), np.int32)
        all_needs[over] = needs
        order = self._order_of(index)
        in_prompts = state.scheduled[index[over]] < state.tokens.prompt_lengths[index[over]]
        why = Why.PROMPT if in_prompts.any() else Why.ANSWER
        self._beams.as_one(index, all_needs)
        order = order[self._beams.one_each(index[order])]
        goes_on = np.zeros(len(index), np.bool_)
        goes_on[order] = make_room(
            index[order],
            all_needs[order],
            cache=self._cache,
            policy=self._victims,
            tenants=self._tenants,
            in_flight=self._last_steps(index[order]) > 0,
            preempt=lambda slot: self._preempt(slot, why),
        )
        self._beams.together(index, goes_on)
        return goes_on

    def _order_of(self, index: Index) -> Index:
        """Places in `index`, slots of running requests, in which these are served."""
        tickets = [self._state.ticket(slot) for slot in index.tolist()]
        keys = [(ticket.key, ticket.arrival) for ticket in tickets]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)

    def _branch_beams(self, draft: PlanDraft) -> bool:
        """Decided groups of beams take their seats; False if blocks ran out for one."""
        had_room = True
        for group in self._beams.to_branch():
            need = self._beams.num_needed(group)
            last = np.array(group.slots[-1:], np.intp)
            may_branch = self._tenants.can_grow(last, np.array([need], np.int32))
            if not may_branch:
                had_room = False
                index = self._state.active
                row = (index == last).nonzero()[0]
                may_branch = bool(self._make_room(index, row, np.array([need], np.int32))[row[0]])
            if may_branch:
                self._beams.branch(group, draft)
        return had_room

    def _events(
        self, index: Index, lengths: Int32s, stops: Bools, has_event: Bools, now_ms: float
    ) -> list[Event]:
        """First tokens and ends among the rows of a step."""
        events = []
        for row in has_event.nonzero()[0].tolist():
            slot = int(index[row])
            ticket = self._state.ticket(slot)
            if ticket.beams is not None:
                continue
            if math.isnan(ticket.first_token_ms):
                ticket.first_token_ms = now_ms
            ticket.last_token_ms = now_ms
            self._state.next_event[slot] = ticket.limit
            reason = None
            if stops[row]:
                reason = FinishReason.STOP
            elif lengths[row] >= ticket.limit:
                reason = FinishReason.LENGTH
            events.append(Event(row=row, ticket=ticket, finish_reason=reason))
        return events

    def _fail(self, errors: Sequence[RowError], plan: StepPlan) -> list[RequestOutput]:
        """End the requests of failed rows; their last outputs."""
        failed = [(self._state.ticket(int(plan.slots[e.row])), e.message) for e in errors]
        self._row_errors += len(failed)
        groups = {ticket.beams: message for ticket, message in failed if ticket.beams is not None}
        failed = [one for one in failed if one[0].beams is None]
        self._end_all([ticket for ticket, _ in failed])
        for group, message in groups.items():
            failed += [(stream, message) for stream in self._forget_beams(group)]
        return [t.output(finish_reason=FinishReason.ERROR, error=message) for t, message in failed]

    def _end_scored(self, tickets: list[Ticket], now_ms: float) -> list[RequestOutput]:
        """End requests that wanted their prompt scored and nothing else; their only outputs."""
        self._end_all(tickets)
        for ticket in tickets:
            ticket.last_token_ms = now_ms
        return [
            t.output(scores=t.take_scores(), finish_reason=FinishReason.LENGTH) for t in tickets
        ]

    def _preempt(self, slot: int, why: Why = Why.ANSWER) -> None:
        """Back to the queue with all tokens known; what was computed may still be found there, or
        is fetched from a tier."""
        state, index = self._state, np.array([slot], np.intp)
        ticket = state.ticket(slot)
        if ticket.beams is not None:
            self._preempt_beams(ticket.beams, why)
            return
        _, moved = self._victims.return_ms(slot)
        if moved:
            self._cache.register(index, state.computed[index], state.tokens.tokens)
            self._cache.swap_out(slot)
        self._tally.preempted(why, moved=moved)
        self._watermark.preempted(self._step)
        ticket.had_computed = int(state.computed[slot])
        ticket.token_ids = state.tokens.tokens[slot, : state.tokens.lengths[slot]].copy()
        ticket.chain = None
        if ticket.request.sampling.mirostat and len(ticket.token_ids) > ticket.num_prompt_tokens:
            ticket.mirostat_mu = float(state.mirostat_mus[slot])
        ticket.num_preemptions += 1
        self._leave([slot])
        self._enqueue(ticket)

    def _preempt_beams(self, group: BeamGroup, why: Why) -> None:
        """A group goes as a whole, and is computed again; its first beam waits for all."""
        slots, first = group.slots, group.members[0]
        self._tally.preempted(why, moved=False)
        self._watermark.preempted(self._step)
        first.had_computed = int(self._state.computed[first.slot])
        group.pack()
        first.num_preemptions += 1
        self._leave(slots)
        self._beams.leave(group)
        self._enqueue(first)

    def _leave_beams(self, ticket: Ticket, group: BeamGroup) -> None:
        """A stream that was told by `group` wants no more; the last of them ends it."""
        group.streams.remove(ticket)
        if not group.streams:
            self._forget_beams(group)
        ticket.alive = False
        del self._tickets[ticket.request.request_id]

    def _end_beams(self, group: BeamGroup, now_ms: float) -> list[RequestOutput]:
        """A search is done; what its streams are told."""
        outputs = self._beams.outputs(group, now_ms)
        for stream, output in zip(group.streams, outputs, strict=True):
            self.lengths.note(stream.request, len(output.token_ids))
        self._forget_beams(group)
        return outputs

    def _forget_beams(self, group: BeamGroup) -> list[Ticket]:
        """A group is over, running or waiting; returns its streams."""
        if group.slots:
            self._leave(group.slots)
        else:
            self._queue.remove(group.members[0])
            self._tenants.waits_no_more(group.members[0])
        for stream in group.streams:
            stream.alive = False
            del self._tickets[stream.request.request_id]
        self._may_admit = True
        return self._beams.forget(group)

    def _enqueue(self, ticket: Ticket) -> None:
        least = self._limits.long_prompt_tokens
        ticket.is_long = 0 < least <= len(ticket.token_ids)
        num_made = len(ticket.token_ids) - ticket.num_prompt_tokens
        likely = self.lengths.predict(ticket.request, ticket.limit)
        ticket.likely_tokens = max(likely - num_made, 1.0)
        self._queue.add(ticket)
        self._tenants.waits(ticket)
        self._may_admit = True

    def _unqueue(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self._tenants.waits_no_more(ticket)
        self._may_admit = True

    def _leave(self, slots: list[int]) -> None:
        """The requests in `slots` stop running, for whatever reason."""
        state, index = self._state, np.array(slots, np.intp)
        for slot in slots:
            self._policy.left(state.ticket(slot))
        self._cache.register(index, state.computed[index], state.tokens.tokens)
        self._cache.free(index, self._last_steps(index))
        self._tenants.runs_no_more(slots)
        state.release(slots)
        self._retired.extend(slots)
        for flight in self._flights:
            flight.left.extend(slots)
        self._may_admit = True

    def _end_all(self, tickets: list[Ticket]) -> None:
        """Running requests are over."""
        if tickets:
            self._leave([ticket.slot for ticket in tickets])
        for ticket in tickets:
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """A request is over; it is in no slot and not in the queue."""
        ticket.alive = False
        self._fetches.forget(ticket)
        del self._tickets[ticket.request.request_id]
        if self._leaders.get(ticket.request.group_id) is ticket:
            del self._leaders[ticket.request.group_id]
            self._hand_over(ticket)

    def _hand_over(self, leader: Ticket) -> None:
        """A leader is gone. Before its prompt was computed, a fork takes its place."""
        waiting = [fork for fork in leader.forks if fork.alive and not fork.was_admitted]
        if not waiting or not math.isnan(leader.first_token_ms):
            return  # the forks find the prompt's blocks, or compute it side by side
        heir = waiting.pop(0)
        heir.leader, heir.forks = None, waiting
        for fork in waiting:
            fork.leader = heir
        self._leaders[heir.request.group_id] = heir

    def _last_steps(self, index: Index) -> NDArray[np.int64]:
        """The last plan that is out and names slot index[i]; 0 for none."""
        steps = np.zeros(len(index), np.int64)
        for flight in self._flights:
            steps[flight.names(index)] = flight.plan.step
        if self._beams.running:
            self._beams.keep_together(index, steps, self._flights)
        return steps
