"""Gate: which waiting requests may not be admitted yet, though it is their turn.

A gated request is passed over and asked again in the next step, or after the next event where
nothing else can help; it loses no place. Gates see tickets and the running state; they change
neither.
"""

from __future__ import annotations

from typing import Protocol

from quire.scheduler.state import RunningState
from quire.scheduler.ticket import NO_SLOT, Ticket


class Gate(Protocol):
    """One reason to wait.

    until_event: only somebody who leaves can end the wait, so that steps need not ask.
    """

    until_event: bool

    def holds(self, ticket: Ticket, state: RunningState, now_ms: float) -> bool:
        """Whether `ticket` must wait longer. Must become False once nothing else runs."""


class GroupGate:
    """Forks wait until the leader of their group has computed the prompt they share.

    Only before their first admission, and only while that leader lives: a fork whose leader has
    ended with nobody in its place, or that was preempted, computes on its own.
    """

    until_event = False

    def holds(self, ticket: Ticket, state: RunningState, now_ms: float) -> bool:
        """Whether the leader still has prompt to compute."""
        leader = ticket.leader
        if leader is None or ticket.was_admitted or not leader.alive:
            return False
        return not prompt_is_computed(leader, state)


class LengthGate:
    """So many requests with long prompts may run at once, and so many others; 0: any number.

    Those of one kind pass waiting ones of the other, whose places they do not take.
    """

    until_event = True

    def __init__(self, max_long: int, max_short: int) -> None:
        self._max_long = max_long
        self._max_short = max_short

    def holds(self, ticket: Ticket, state: RunningState, now_ms: float) -> bool:
        """Whether as many of its kind run as may."""
        if ticket.is_long:
            return 0 < self._max_long <= state.num_long
        num_short = len(state.tickets) - len(state.free_slots) - state.num_long
        return 0 < self._max_short <= num_short


def prompt_is_computed(ticket: Ticket, state: RunningState) -> bool:
    """Whether a running request's blocks hold its whole prompt now."""
    return ticket.slot != NO_SLOT and int(state.computed[ticket.slot]) >= ticket.num_prompt_tokens
