"""Yielding: who runs and makes way for somebody whose turn, by the policy, is before his.

Two ways. A row stands back: it is left out of a step so that the prompt of another is computed
sooner; it loses nothing, and an answer's bits do not depend on the steps it is made in. A request
is preempted so that one that waits gets its slot and its blocks. Whom that is for, and who owes it,
says the policy. Always holds: of those that stand back a few go on in each step, the longest
waiting first, so nobody stands still; nobody is preempted in this way who is nearly finished or was
preempted often enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.giving_way import GivingWay
from quire.scheduler.placement import place
from quire.scheduler.policy import NEARLY_FINISHED_TOKENS, Policy
from quire.scheduler.preemption_tally import Why
from quire.scheduler.roster import Roster
from quire.scheduler.state import RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import NO_SLOT, Ticket
from quire.scheduler.victims import PATIENCE, Victims
from quire.scheduler.watermark import Watermark

# Of rows that stand back, one in so many goes on all the same.
GOING_ON = 16


@dataclass(frozen=True, slots=True)
class StandsBack:
    """Rows left out of a step for the prompt of `ticket`, which was scheduled up to `scheduled`,
    -1 if it waited, and by layers_done layers further. tickets: theirs; with how often each had
    been preempted."""

    slots: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    scheduled: int = -1
    layers_done: int = 0
    tickets: list[tuple[Ticket, int]] = field(default_factory=list)

    def was_for(self, state: RunningState) -> bool:
        """Whether the prompt got on in the step, now that it is put together."""
        ticket = self.ticket
        if ticket is None or ticket.slot == NO_SLOT:
            return False
        reached = int(state.scheduled[ticket.slot]), ticket.layers_done
        return reached > (self.scheduled, self.layers_done)

    def others(self, state: RunningState) -> list[int]:
        """Slots that run and are not of those that stood back, or not any more."""
        slots = {ticket.slot for ticket, times in self.tickets if ticket.num_preemptions == times}
        return [slot for slot in state.active.tolist() if slot not in slots]


NOBODY_BACK = StandsBack()


@dataclass(frozen=True, slots=True, kw_only=True)
class Concession:
    """What others would do for a request that waits: rows that stand back while its prompt is
    computed, slots that it may take, and the blocks in them."""

    rows: int = 0
    slots: int = 0
    blocks: int = 0


NO_CONCESSION = Concession()


class Yielding:
    """Of one scheduler, which asks at the beginning of a step where somebody may be admitted or
    is hurried.

    is_pending: whether somebody is in flight who is to lose its place in the next step.
    """

    def __init__(
        self,
        roster: Roster,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        *,
        giving_way: GivingWay,
        victims: Victims,
        watermark: Watermark,
    ) -> None:
        self._roster = roster
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._giving_way = giving_way
        self._victims = victims
        self._watermark = watermark
        self.is_pending = False

    def begin_step(self, paused: list[int]) -> tuple[list[int], StandsBack]:
        """Preempts who must lose its place now; those who must, but are in flight, are added to
        paused, and lose it then. Returns that, and who stands back in this step."""
        roster, self.is_pending = self._roster, False
        first = roster.queue.first if roster.may_admit and len(roster.queue) else None
        if first is not None:
            in_flight = self._make_way(first)
            self.is_pending = bool(in_flight)
            paused = paused + in_flight
        return paused, self._standing_back(first)

    def concession(self, ticket: Ticket) -> Concession:
        """What `ticket`, which waits, would find if it were next now."""
        policy, state = self._policy, self._state
        if not policy.makes_way or not policy.may_be_owed(ticket):
            return NO_CONCESSION
        slots = state.active.tolist()
        running = (state.ticket(slot) for slot in slots)
        owing = sum(one.beams is None and policy.owes(one, ticket) for one in running)
        may_go = [] if ticket.beams is not None else [s for s in slots if self._may_go(s, ticket)]
        return Concession(
            rows=owing - -(-owing // GOING_ON),
            slots=len(may_go),
            blocks=sum(map(self._cache.num_freed_by, may_go)),
        )

    def _standing_back(self, first_waiting: Ticket | None) -> StandsBack:
        """Who is left out of this step, for a prompt that runs or for who is next."""
        state, policy = self._state, self._policy
        ticket = policy.hurries(first_waiting)
        if ticket is None:
            return NOBODY_BACK
        tickets = [state.ticket(slot) for slot in state.active.tolist()]
        owing = [one for one in tickets if one.beams is None and policy.owes(one, ticket)]
        # Those without a token yet are NaN, and come last.
        waited = state.last_token_ms[[one.slot for one in owing]]
        longest_first = np.argsort(waited, kind="stable")[-(-len(owing) // GOING_ON) :]
        standing = [owing[place] for place in longest_first.tolist()]
        if not standing:
            return NOBODY_BACK
        return StandsBack(
            slots=[one.slot for one in standing],
            ticket=ticket,
            scheduled=-1 if ticket.slot == NO_SLOT else int(state.scheduled[ticket.slot]),
            layers_done=ticket.layers_done,
            tickets=[(one, one.num_preemptions) for one in standing],
        )

    def _make_way(self, ticket: Ticket) -> list[int]:
        """Preempt for `ticket`, which is next and lacks a slot or blocks, who owes it to it.

        Returns slots that are in flight: left out of this step, they can be preempted in the next.
        Nobody is preempted where even all would not do.
        """
        state, cache = self._state, self._cache
        if ticket.beams is not None or self._tenants.is_full(ticket):
            return []
        if not self._policy.may_be_owed(ticket):
            return []
        slots = [slot for slot in state.active.tolist() if self._may_go(slot, ticket)]
        if not slots:
            return []
        placement = place(ticket, cache, state)
        active = state.active
        room = cache.num_takeable(placement.match) - self._tenants.kept_from(ticket)
        room -= int(np.add.reduce(cache.blocks_short(active, state.goal[active])))
        room -= self._watermark.blocks(len(active), self._roster.flights.step + 1)
        lacking = placement.num_new_blocks - room
        if state.free_slots and lacking <= 0:
            return []
        chosen: list[int] = []
        # Who was left out of the last step for this comes before others again.
        for slot in sorted(self._victims.victims(np.array(slots)).tolist(), key=self._is_in_flight):
            chosen.append(slot)
            lacking -= cache.num_freed_by(slot)
            if lacking <= 0:
                break
        if lacking > 0:
            return []
        in_flight = [slot for slot in chosen if self._is_in_flight(slot)]
        for slot in chosen:
            if slot not in in_flight:
                self._giving_way.preempt(slot, Why.TURN)
        return in_flight

    def _is_in_flight(self, slot: int) -> bool:
        return bool(self._roster.last_steps(np.array([slot]))[0])

    def _may_go(self, slot: int, ticket: Ticket) -> bool:
        """Whether the request in `slot` may be preempted for `ticket`."""
        state, running = self._state, self._state.ticket(slot)
        left = int(state.longest[slot]) - int(state.computed[slot])
        return (
            running.slot != NO_SLOT
            and running.beams is None
            and left > NEARLY_FINISHED_TOKENS
            and running.num_preemptions < PATIENCE
            and self._policy.takes_place(running, ticket)
            and self._tenants.may_lose_for(slot, ticket)
        )
