"""GivingWay: running requests lose their slots, for others or because their tenant has too much.

Ties what is known of victims (whose loss is cheapest, who must not lose to whom) to what losing a
slot means: back to the queue, with all tokens known. Always holds: what was generated is kept, so
a preempted request goes on as if nothing had happened; a group of beams goes as a whole; nobody is
preempted whom a plan in flight names.
"""

from __future__ import annotations

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.groups import BeamGroup, BeamGroups
from quire.scheduler.policy import Policy
from quire.scheduler.preemption import make_room
from quire.scheduler.preemption_tally import PreemptionTally, Why
from quire.scheduler.roster import Roster
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import Ticket
from quire.scheduler.victims import Victims
from quire.scheduler.watermark import Watermark


class GivingWay:
    """Of one scheduler. Counts in `tally`, and tells `watermark`."""

    def __init__(
        self,
        roster: Roster,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        beams: BeamGroups,
        *,
        victims: Victims,
        watermark: Watermark,
        tally: PreemptionTally,
    ) -> None:
        self._roster = roster
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._beams = beams
        self._victims = victims
        self._watermark = watermark
        self._tally = tally

    def in_order(self, index: Index) -> Index:
        """Places in `index`, slots of running requests, in which these are served."""
        tickets = [self._state.ticket(slot) for slot in index.tolist()]
        keys = [(ticket.key, ticket.arrival) for ticket in tickets]
        return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)

    def make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Which of the rows of slots `index` may go on, after preempting others; served in the
        policy's order. over: the rows that lack blocks, needs: how many."""
        state = self._state
        all_needs = np.zeros(len(index), np.int32)
        all_needs[over] = needs
        order = self.in_order(index)
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
            in_flight=self._roster.last_steps(index[order]) > 0,
            preempt=lambda slot: self.preempt(slot, why),
        )
        self._beams.together(index, goes_on)
        return goes_on

    def keep_ceilings(self) -> list[int]:
        """Preempt the last requests of tenants that have grown beyond their ceilings.

        Returns slots that are in flight: they are left out of this step, and preempted then.
        """
        paused: list[int] = []
        for tenant, slots in self._tenants.above_ceilings():
            served = slots[self.in_order(slots)]
            served = served[self._beams.one_each(served)]
            for slot in self._policy.victims(served[1:]).tolist():
                if not self._tenants.is_above_ceiling(tenant):
                    break
                if self._roster.last_steps(np.array([slot]))[0]:
                    paused.append(slot)
                else:
                    self.preempt(slot, Why.CEILING)
        return paused

    def preempt(self, slot: int, why: Why = Why.ANSWER) -> None:
        """Back to the queue with all tokens known; what was computed may still be found there, or
        is fetched from a tier."""
        ticket = self._state.ticket(slot)
        if ticket.beams is not None:
            self._preempt_beams(ticket.beams, why)
            return
        moved = self._pack(slot, ticket)
        self._tally.preempted(why, moved=moved)
        self._watermark.preempted(self._roster.flights.step)
        ticket.had_computed = int(self._state.computed[slot])
        ticket.num_preemptions += 1
        self._roster.leave([slot])
        self._roster.enqueue(ticket)

    def set_aside(self, slot: int) -> None:
        """The request in `slot`, which is held, leaves it as a preempted one does; it has lost
        nothing to anybody, so it does not count as one."""
        self._pack(slot, self._state.ticket(slot))
        self._roster.leave([slot])

    def _pack(self, slot: int, ticket: Ticket) -> bool:
        """What a request has to know to go on from another slot; whether its blocks are moved to a
        tier, because that is the cheaper way back."""
        state, index = self._state, np.array([slot], np.intp)
        _, moved = self._victims.return_ms(slot)
        if moved:
            self._cache.register(index, state.computed[index], state.tokens.tokens)
            self._cache.swap_out(slot)
        ticket.token_ids = state.tokens.tokens[slot, : state.tokens.lengths[slot]].copy()
        ticket.chain = None
        if ticket.request.sampling.mirostat and len(ticket.token_ids) > ticket.num_prompt_tokens:
            ticket.mirostat_mu = float(state.mirostat_mus[slot])
        return moved

    def _preempt_beams(self, group: BeamGroup, why: Why) -> None:
        """A group goes as a whole, and is computed again; its first beam waits for all."""
        slots, first = group.slots, group.members[0]
        self._tally.preempted(why, moved=False)
        self._watermark.preempted(self._roster.flights.step)
        first.had_computed = int(self._state.computed[first.slot])
        group.pack()
        first.num_preemptions += 1
        self._roster.leave(slots)
        self._beams.leave(group)
        self._roster.enqueue(first)
