"""Admission: which waiting requests begin in a step, and with how many tokens of its budget.

Knows the queue's order, gates, placements and what must stay free for those that run. Preempts
nobody. Always holds: a request is admitted only if the blocks for all its known tokens are free
beside those that running requests still need for theirs; who is blocked blocks those behind it,
so nobody is overtaken but by those a gate lets pass, and long prompts by a few short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.chain import PrefixMatch
from quire.cache.manager import CacheManager
from quire.scheduler.budget import StepBudget
from quire.scheduler.coming import ComingBlocks
from quire.scheduler.draft import PlanDraft
from quire.scheduler.fetches import Fetches
from quire.scheduler.gate import Gate
from quire.scheduler.groups import BeamGroups
from quire.scheduler.placement import Placement, place
from quire.scheduler.policy import Policy
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.seating import Row, Seating
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket
from quire.scheduler.watermark import Watermark
from quire.scheduler.yielding import NOBODY_BACK, StandsBack

# Requests whose prefixes are digested and looked up together.
LOOK_UP_AT_ONCE = 16
# So many short requests may pass a long one that lacks blocks; then it blocks them.
MAX_PASSED = 16


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One walk along the queue, and what has come of it so far.

    spoken_for: blocks that running requests and newcomers still need for what they know. blocked:
    somebody lacks blocks, so that only tenants with a floor left go on. started: slots of `rows`,
    and of beams that have no row yet; begun: whose rows they are. held: tenants whose turn has
    come, and who wait. passed: a long one that lacks blocks and may still be passed by short ones.
    matches: prefixes that were looked up ahead.
    """

    draft: PlanDraft
    budget: StepBudget
    now_ms: float
    num_running: int
    spoken_for: int
    blocked: bool
    try_again: bool = False
    rows: list[Row] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    begun: list[Ticket] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    passed: Ticket | None = None
    skips_long: bool = False
    matches: dict[int, PrefixMatch] = field(default_factory=dict)  # by arrival


class Admissions:
    """Admits into `state` and `cache`, by `seating`."""

    def __init__(
        self,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        gates: Sequence[Gate],
        groups: BeamGroups,
        *,
        fetches: Fetches,
        watermark: Watermark,
        seating: Seating,
    ) -> None:
        self._groups = groups
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._gates = gates
        self._fetches = fetches
        self._watermark = watermark
        self._seating = seating
        self._coming = ComingBlocks(cache.block_size)

    def admit(
        self,
        queue: WaitingQueue,
        draft: PlanDraft,
        budget: StepBudget,
        now_ms: float,
        *,
        floors_only: bool = False,
        before: tuple[float, ...] | None = None,
        stands_back: StandsBack = NOBODY_BACK,
    ) -> bool:
        """Admit while budget, slots and blocks last. floors_only: those whose tenant has blocks
        held back for it, into these. before: none of this rank or behind. stands_back: where the
        prompt that others stand back for gets on in this step, nobody begins in it who owes that.

        Returns whether trying again in the next step can succeed though nothing else happens.
        """
        state = self._state
        # Nobody can be admitted: then nobody looks for a prefix, and registering can wait.
        if budget.spent or not state.free_slots:
            return budget.spent
        walk = self._begin(draft, budget, now_ms, floors_only=floors_only)
        for ticket in self._upcoming(walk, queue):
            if budget.spent or (before is not None and self._policy.rank(ticket) >= before):
                walk.try_again = True
                break
            if self._ends_walk(walk, ticket):
                break
            if stands_back.was_for(state) and self._owes(ticket, stands_back.ticket):
                walk.try_again = True  # those behind had as much
                break
            if self._is_held(walk, ticket):
                continue
            placement = place(ticket, self._cache, state, walk.matches.get(ticket.arrival))
            if self._is_coming(ticket, placement, budget):
                walk.try_again = True
                continue
            if not self._has_room(walk, ticket, placement):
                continue
            if self._fetches.begin(ticket, placement, now_ms):
                walk.spoken_for += placement.num_new_blocks - len(placement.places)
                walk.matches.clear()  # what was taken now may have been found before
                continue
            count = self._hand_out(budget, ticket, placement)
            if count >= 1:
                self._seat(walk, ticket, placement, count)
                continue
            walk.try_again = True
            if not ticket.is_long:
                break
            walk.skips_long = True  # its kind's share of the step is spent, not the step
        if walk.rows:
            queue.remove_all(walk.begun)
            state.activate(walk.started)
            self._seating.add_rows(draft, walk.rows)
        return walk.try_again

    def _upcoming(self, walk: _Walk, queue: WaitingQueue) -> Iterator[Ticket]:
        """Yield the waiting requests in order; prefixes are looked up for some at a time.

        What is found stays valid until a block is allocated, which is put off to the walk's end.
        """
        for batch in queue.batches(LOOK_UP_AT_ONCE):
            if len(batch) > 1 and self._cache.prefix_caching:
                self._look_up(walk, batch[: len(self._state.free_slots)])
            yield from batch

    def _look_up(self, walk: _Walk, tickets: list[Ticket]) -> None:
        """Find the prefixes of `tickets`, but of those that share or score one."""
        tickets = [one for one in tickets if one.leader is None]
        fresh = [one for one in tickets if one.chain is None]
        if fresh:
            chains = self._cache.chains(
                [(one.token_ids, one.request.cache_salt, one.request.tenant) for one in fresh]
            )
            for one, chain in zip(fresh, chains, strict=True):
                one.chain = chain
        chained = [(one.arrival, one.chain) for one in tickets if one.chain is not None]
        if chained:
            matches = self._cache.match_all([chain for _, chain in chained])
            walk.matches = dict(zip([arrival for arrival, _ in chained], matches, strict=True))

    def _begin(
        self, draft: PlanDraft, budget: StepBudget, now_ms: float, *, floors_only: bool
    ) -> _Walk:
        """What running requests have computed is findable; what they need is spoken for."""
        state, cache = self._state, self._cache
        self._tenants.changed()
        self._coming.begin_step(state)
        active = state.active
        cache.register(active, state.computed[active], state.tokens.tokens)
        return _Walk(
            draft=draft,
            budget=budget,
            now_ms=now_ms,
            num_running=len(active),
            spoken_for=int(np.add.reduce(cache.blocks_short(active, state.goal[active]))),
            blocked=floors_only,
        )

    def _ends_walk(self, walk: _Walk, ticket: Ticket) -> bool:
        """Whether neither `ticket` nor anybody behind it can begin."""
        if len(self._state.free_slots) < ticket.num_slots:
            return True
        if walk.passed is not None and walk.passed.passed >= MAX_PASSED:
            walk.blocked = True
        return walk.blocked and not self._tenants.someone_has_floor_left()

    def _owes(self, ticket: Ticket, hurried: Ticket | None) -> bool:
        return hurried is not None and self._policy.owes(ticket, hurried)

    def _is_held(self, walk: _Walk, ticket: Ticket) -> bool:
        """Whether `ticket` waits for something other than blocks, and others may go first."""
        tenants = self._tenants
        if ticket.request.tenant in walk.held or tenants.is_full(ticket):
            return True
        if (walk.skips_long and ticket.is_long) or (
            walk.blocked and not tenants.has_floor_left(ticket)
        ):
            return True
        for gate in self._gates:
            if gate.holds(ticket, self._state, walk.now_ms):
                walk.try_again |= not gate.until_event
                return True
        return False

    def _is_coming(self, ticket: Ticket, placement: Placement, budget: StepBudget) -> bool:
        """Whether so much of its prefix will be there when steps in flight end that it waits."""
        if placement.match is None or ticket.has_positions_to_score:
            return False
        could_compute = min(len(ticket.token_ids) - placement.start, budget.tokens)
        return self._coming.holds(ticket, placement.match.num_blocks, could_compute, self._state)

    def _has_room(self, walk: _Walk, ticket: Ticket, placement: Placement) -> bool:
        """Whether there are blocks for all `ticket` knows; if not, who else waits for them."""
        cache, tenants = self._cache, self._tenants
        num_running = walk.num_running + len(walk.rows)
        margin = self._watermark.blocks(num_running, walk.draft.step)
        takeable = cache.num_takeable(placement.match)
        taken = placement.num_new_blocks + cache.num_free - takeable
        if not tenants.passes_ceiling(ticket, taken):
            walk.held.add(ticket.request.tenant)
            return False
        room = takeable - walk.spoken_for - margin - tenants.kept_from(ticket)
        if not walk.blocked and placement.num_new_blocks <= room:
            return True
        if tenants.fits_floor(ticket, taken):
            return True
        # What was fetched for others gives way; there may be room in the next step.
        walk.try_again = self._fetches.let_go(ticket) or walk.try_again
        if ticket.is_long and not walk.blocked:
            walk.passed, walk.skips_long = ticket, True
        else:
            walk.blocked = True
            walk.held.add(ticket.request.tenant)
        return False

    def _hand_out(self, budget: StepBudget, ticket: Ticket, placement: Placement) -> int:
        """Tokens of the step for `ticket`; 0 where none are left for its kind."""
        return budget.hand_out_one(
            placement.start,
            len(ticket.token_ids) - placement.start,
            scored=ticket.has_positions_to_score,
            is_long=ticket.is_long,
        )

    def _seat(self, walk: _Walk, ticket: Ticket, placement: Placement, count: int) -> None:
        """`ticket` begins with `count` tokens; it leaves the queue when the walk is over."""
        cache, start = self._cache, placement.start
        walk.begun.append(ticket)
        if walk.passed is not None:
            walk.passed.passed += 1
        self._tenants.waits_no_more(ticket)
        slot = self._seating.seat(walk.draft, ticket, placement, walk.now_ms)
        if placement.match is not None:
            self._coming.expect(ticket, len(placement.match.blocks), start + count)
        if placement.leader_slot is not None:
            walk.matches.clear()
        row = (slot, start, count)
        walk.rows.append(row)
        walk.started.append(slot)
        # Its blocks are taken when the walk is over: at once, so that their number is known, only
        # where tenants' shares are counted by what they hold.
        walk.spoken_for += cache.blocks_for(len(ticket.token_ids)) - int(cache.tables.counts[slot])
        if self._tenants.has_floors:
            before = cache.num_free
            self._seating.allocate([row])
            walk.spoken_for -= before - cache.num_free
            walk.matches.clear()
        walk.spoken_for += ticket.num_tail_blocks(cache)
        if ticket.beams is not None:
            walk.started += self._groups.seat(ticket, walk.draft)
