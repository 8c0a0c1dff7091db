"""Roster: the requests that live, and how each comes to wait, runs no more, and is over.

Knows tickets, their groups and where they stand: in the queue, or in a slot. Knows no budget and
no results, and decides nothing: who is to leave is an argument. Always holds: a live request is in
the queue, or in a slot, or told by a group of beams that is, or aside because it is held; who
leaves a slot gives its blocks back, findable as far as they were computed; every leave may let
somebody in (`may_admit`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.cache.manager import CacheManager
from quire.scheduler.fetches import Fetches
from quire.scheduler.flight import Flights
from quire.scheduler.groups import BeamGroup, BeamGroups
from quire.scheduler.lengths import LengthHistory
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy import Policy
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.state import Index, RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import NO_SLOT, Ticket


class Roster:
    """tickets: by id. retired: slots given back since the last plan went out.

    may_admit: whether an admission may succeed; set by events, so that a queue that is blocked
    costs nothing.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        state: RunningState,
        cache: CacheManager,
        policy: Policy,
        tenants: TenantBooks,
        beams: BeamGroups,
        fetches: Fetches,
        lengths: LengthHistory,
    ) -> None:
        self._long_prompt_tokens = limits.long_prompt_tokens
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._beams = beams
        self._fetches = fetches
        self._lengths = lengths
        self.queue = WaitingQueue(policy)
        self.flights = Flights()
        self.tickets: dict[str, Ticket] = {}
        self._leaders: dict[str, Ticket] = {}  # by group
        self.retired: list[int] = []
        self.may_admit = False

    def come(self, ticket: Ticket) -> Ticket | None:
        """A new request; returns who waits for it: itself, or the first beam of its group. None
        where a beam of the group stands there already."""
        self.tickets[ticket.request.request_id] = ticket
        if ticket.request.sampling.use_beam_search:
            first = self._beams.join(ticket)
            if first is not None:
                self.enqueue(first)
            return first
        leader = self._leaders.get(ticket.request.group_id)
        if leader is None:  # the first of its group
            self._leaders[ticket.request.group_id] = ticket
        else:
            ticket.leader = leader
            leader.forks.append(ticket)
        self.enqueue(ticket)
        return ticket

    def enqueue(self, ticket: Ticket) -> None:
        """`ticket` waits from now on; one that is held does so aside."""
        if ticket.is_held:
            return
        least = self._long_prompt_tokens
        ticket.is_long = 0 < least <= len(ticket.token_ids)
        num_made = len(ticket.token_ids) - ticket.num_prompt_tokens
        likely = self._lengths.predict(ticket.request, ticket.limit)
        ticket.likely_tokens = max(likely - num_made, 1.0)
        self.queue.add(ticket)
        self._tenants.waits(ticket)
        self.may_admit = True

    def requeue(self, ticket: Ticket) -> None:
        """`ticket`, which waits, gets a new place."""
        if not ticket.is_held:
            self._unqueue(ticket)
            self.enqueue(ticket)

    def set_aside(self, ticket: Ticket) -> None:
        """`ticket`, which waited and is held now, is out of the queue until it is enqueued."""
        self._unqueue(ticket)
        self._fetches.drop(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """`ticket`, which waits, is over."""
        if not ticket.is_held:
            self._unqueue(ticket)
        self._forget(ticket)

    def abort(self, ticket: Ticket) -> None:
        """`ticket` is over, wherever it is."""
        if ticket.beams is not None:
            self._leave_beams(ticket, ticket.beams)
        elif ticket.slot == NO_SLOT:
            self.withdraw(ticket)
        else:
            self.end_all([ticket])

    def end_all(self, tickets: list[Ticket]) -> None:
        """Running requests are over."""
        if tickets:
            self.leave([ticket.slot for ticket in tickets])
        for ticket in tickets:
            self._forget(ticket)

    def leave(self, slots: list[int]) -> None:
        """The requests in `slots` stop running, for whatever reason."""
        state, index = self._state, np.array(slots, np.intp)
        for slot in slots:
            self._policy.left(state.ticket(slot))
        self._cache.register(index, state.computed[index], state.tokens.tokens)
        self._cache.free(index, self.last_steps(index))
        self._tenants.runs_no_more(slots)
        state.release(slots)
        self.retired.extend(slots)
        self.flights.left(slots)
        self.may_admit = True

    def take_retired(self) -> list[int]:
        """Slots given back since this was last asked."""
        retired, self.retired = self.retired, []
        return retired

    def last_steps(self, index: Index) -> NDArray[np.int64]:
        """The last plan that is out and names slot index[i], or one of its beams; 0 for none."""
        steps = self.flights.last_steps(index)
        if self._beams.running:
            self._beams.keep_together(index, steps, self.flights)
        return steps

    def forget_beams(self, group: BeamGroup) -> list[Ticket]:
        """A group is over, running or waiting; returns its streams."""
        if group.slots:
            self.leave(group.slots)
        else:
            self.queue.remove(group.members[0])
            self._tenants.waits_no_more(group.members[0])
        for stream in group.streams:
            stream.alive = False
            del self.tickets[stream.request.request_id]
        self.may_admit = True
        return self._beams.forget(group)

    def _leave_beams(self, ticket: Ticket, group: BeamGroup) -> None:
        """A stream that was told by `group` wants no more; the last of them ends it."""
        group.streams.remove(ticket)
        if not group.streams:
            self.forget_beams(group)
        ticket.alive = False
        del self.tickets[ticket.request.request_id]

    def _unqueue(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        self._tenants.waits_no_more(ticket)
        self.may_admit = True

    def _forget(self, ticket: Ticket) -> None:
        """A request is over; it is in no slot and not in the queue."""
        ticket.alive = False
        self._fetches.forget(ticket)
        del self.tickets[ticket.request.request_id]
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
