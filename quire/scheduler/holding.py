"""Holding: requests whose reader does not keep up stand aside until it does.

A held request leaves its slot as soon as no plan in flight names it. What it computed stays
findable, so it costs those that run nothing and goes on, when it is released, behind the tokens it
has; if its blocks are needed meanwhile they are taken like any others. Beams are not held: they
say nothing before their end. Always holds: who stands aside is in no slot and not in the queue.
"""

from __future__ import annotations

import numpy as np

from quire.scheduler.giving_way import GivingWay
from quire.scheduler.roster import Roster
from quire.scheduler.ticket import NO_SLOT, Ticket


class Holding:
    """Of one scheduler. num_held_total: how often a request was held."""

    def __init__(self, roster: Roster, giving_way: GivingWay) -> None:
        self._roster = roster
        self._giving_way = giving_way
        self._held: dict[str, Ticket] = {}
        self._leaving: dict[str, Ticket] = {}  # of those, who may still be in a slot
        self.num_held_total = 0

    @property
    def num_held(self) -> int:
        """How many live requests are held."""
        return sum(ticket.alive for ticket in self._held.values())

    def hold(self, ticket: Ticket) -> None:
        """`ticket` gets no more steps until it is released."""
        if ticket.is_held or ticket.beams is not None:
            return
        ticket.is_held = True
        self.num_held_total += 1
        self._held[ticket.request.request_id] = ticket
        if ticket.slot == NO_SLOT:
            self._roster.set_aside(ticket)
        else:
            self._leaving[ticket.request.request_id] = ticket

    def release(self, ticket: Ticket) -> None:
        """`ticket` goes on."""
        if not ticket.is_held:
            return
        ticket.is_held = False
        del self._held[ticket.request.request_id]
        self._leaving.pop(ticket.request.request_id, None)
        if ticket.slot == NO_SLOT:
            self._roster.enqueue(ticket)

    def begin_step(self) -> list[int]:
        """Held requests leave their slots. Returns the slots of those in flight, which are left
        out of this step and leave when they have landed."""
        if not self._held:
            return []
        self._held = {name: one for name, one in self._held.items() if one.alive}
        in_flight = {}
        for name, ticket in self._leaving.items():
            if ticket.slot == NO_SLOT:  # it has ended, or was preempted
                continue
            if self._roster.last_steps(np.array([ticket.slot]))[0]:
                in_flight[name] = ticket
            else:
                self._giving_way.set_aside(ticket.slot)
        self._leaving = in_flight
        return [ticket.slot for ticket in in_flight.values()]
