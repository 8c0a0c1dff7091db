"""Progress: the next rows of the requests that run, and the blocks these need.

Hands a step's budget to running requests, gives blocks to those that outgrow theirs, has others
give way where blocks run short, and lets groups of beams branch. Knows no queue but how long it is
and who is first. Always holds: a row is scheduled only with blocks for all it stores; what a row
was handed and cannot use is given back.
"""

from __future__ import annotations

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.budget import StepBudget
from quire.scheduler.draft import PlanDraft
from quire.scheduler.fetches import Fetches
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.groups import BeamGroups
from quire.scheduler.layered import LayeredParts
from quire.scheduler.prompts import PromptShares
from quire.scheduler.roster import Roster
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import NO_SLOT, Ticket

NOBODY: list[Ticket] = []


class Progress:
    """Of the requests that run in one scheduler."""

    def __init__(
        self,
        roster: Roster,
        state: RunningState,
        cache: CacheManager,
        tenants: TenantBooks,
        beams: BeamGroups,
        *,
        giving_way: GivingWay,
        prompts: PromptShares,
        layered: LayeredParts,
        fetches: Fetches,
    ) -> None:
        self._roster = roster
        self._state = state
        self._cache = cache
        self._tenants = tenants
        self._beams = beams
        self._giving_way = giving_way
        self._prompts = prompts
        self._layered = layered
        self._fetches = fetches

    def go_on(
        self,
        draft: PlanDraft,
        budget: StepBudget,
        paused: list[int],
        *,
        by_key: bool = False,
        is_hurried: bool = False,
    ) -> tuple[bool, list[Ticket]]:
        """Schedule the running requests but those paused; whether there were blocks enough, and
        whose prompts stepped back behind waiting ones. by_key: strictly in the order of keys.
        is_hurried: see PromptShares."""
        state, cache = self._state, self._cache
        index, slots = state.active, state.active_slots
        if paused:
            goes_on = ~np.isin(index, paused)
            index, slots = index[goes_on], slots[goes_on]
        starts, goals = state.scheduled[index], state.goal[index]
        scored = state.still_scored(index, starts)
        if by_key:
            counts, behind = self._by_key(budget, index, starts, goals - starts, scored), NOBODY
        else:
            counts, behind = self._hand_out(
                budget, index, starts, goals - starts, scored, is_hurried
            )
        ends = starts + counts
        had_room, goes_on = True, counts > 0
        by_layers = None if by_key else self._layered.row(index)
        over = (ends > cache.capacities[index]).nonzero()[0]
        if len(over):
            needs = cache.blocks_short(index[over], ends[over])
            had_room = self._has_room(index[over], needs)
            if not had_room:
                may = self._giving_way.make_room(index, over, needs)
                unused = ~may
                if by_layers is not None:
                    unused[by_layers] = False  # it was handed none of the step's rows
                budget.give_back(
                    starts[unused], counts[unused], None if scored is None else scored[unused]
                )
                goes_on &= may
                over, needs = over[may[over]], needs[may[over]]
                behind = [ticket for ticket in behind if ticket.slot != NO_SLOT]
            if len(over):
                draft.add_deltas(cache.allocate(index[over], needs))
        if by_layers is not None and goes_on[by_layers]:
            self._layered.send(draft)
            goes_on[by_layers] = False
        num_rows = np.count_nonzero(goes_on)
        if num_rows < len(index):
            index, slots, starts = index[goes_on], slots[goes_on], starts[goes_on]
            goals, counts, ends = goals[goes_on], counts[goes_on], ends[goes_on]
        if num_rows:
            sample_counts = state.schedule(index, ends, goals)
            store_from = np.maximum(starts, state.stored[index])
            draft.add_rows(index, slots, starts, counts, ends, store_from, sample_counts)
        return had_room, behind

    def branch_beams(self, draft: PlanDraft) -> bool:
        """Decided groups of beams take their seats; False if blocks ran out for one."""
        had_room = True
        for group in self._beams.to_branch():
            needs = np.array([self._beams.num_needed(group)], np.int32)
            last = np.array(group.slots[-1:], np.intp)
            may_branch = self._has_room(last, needs)
            if not may_branch:
                had_room = False
                index = self._state.active
                row = (index == last).nonzero()[0]
                rows = self._giving_way.make_room(index, row, needs)
                may_branch = bool(rows[row[0]])
            if may_branch:
                self._beams.branch(group, draft)
        return had_room

    def _by_key(
        self,
        budget: StepBudget,
        index: Index,
        starts: Int32s,
        wanted: Int32s,
        scored: Bools | None,
    ) -> Int32s:
        """Tokens for the rows of slots `index`, strictly in the order of keys."""
        order, counts = self._giving_way.in_order(index), np.zeros(len(index), np.int32)
        of_scored = None if scored is None else scored[order]
        counts[order] = budget.hand_out(starts[order], wanted[order], of_scored)
        return counts

    def _hand_out(
        self,
        budget: StepBudget,
        index: Index,
        starts: Int32s,
        wanted: Int32s,
        scored: Bools | None,
        is_hurried: bool,
    ) -> tuple[Int32s, list[Ticket]]:
        """Tokens for the rows of slots `index`, and whose prompts stepped back."""
        if not np.count_nonzero(wanted > 1):
            return budget.hand_out(starts, wanted, scored), NOBODY
        queue = self._roster.queue
        first = queue.first if self._roster.may_admit and len(queue) else None
        shares = self._prompts.hand_out(
            budget, index, starts, wanted, scored, first, len(queue), is_hurried
        )
        return shares.counts, [self._state.ticket(int(index[row])) for row in shares.behind]

    def _has_room(self, index: Index, needs: Int32s) -> bool:
        """Whether needs[i] blocks are there for slots index[i], once what is kept is let go."""
        return self._tenants.can_grow(index, needs) or (
            self._fetches.let_go() and self._tenants.can_grow(index, needs)
        )
