"""Policy: in which order requests are served, and who gives up blocks when they run out.

A policy sees tickets, slots and what steps cost, never blocks or budgets, and reads no clock:
waiting counts because keys are static. A key that grows with the time of arrival lets everybody
be overtaken only by those who came within a bounded time, and never needs re-keying.
It need not care for progress: the scheduler serves running requests by their keys, and asks for
victims only among those behind the one that lacks blocks, so the first always gets on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.lengths import LengthHistory
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket

# Who may have at most so many tokens left is preempted last: what it holds is free soon anyway.
NEARLY_FINISHED_TOKENS = 16


class Policy(Protocol):
    """Order of the queue and choice of victim. `FirstCome` is one to begin from.

    makes_way: whether anybody who runs may ever owe anything; if not, `hurries`, `may_be_owed`,
    `owes` and `takes_place` are not asked. hurried: who runs, and for whose prompts others may
    stand back.
    """

    makes_way: bool
    hurried: list[Ticket]

    def begin(self, state: RunningState, speed: SpeedEstimate, lengths: LengthHistory) -> None:
        """Told once, before anything else: the running requests, what steps cost, how long
        answers were."""

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """Requests are served by ascending key, those of a lane among each other. Asked whenever
        one enters the queue; must not fall while it lives, but for its own progress."""

    def handicap_ms(self, ticket: Ticket) -> float:
        """Within its lane it is served as if it had come so much later."""

    def lane(self, ticket: Ticket) -> str:
        """Which part of the queue it waits in. One lane: the keys alone decide."""

    def lane_opens(self, lane: str, others: Collection[str]) -> None:
        """A first request waits in `lane`, beside those of `others`."""

    def lane_keys(self, lanes: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """Now: the lane with the smallest is served next; a key begins with the lane's kind. Not
        asked where there is but one."""

    def rank(self, ticket: Ticket) -> tuple[float, ...]:
        """Now: prompts, running or waiting, get tokens by ascending rank."""

    def admitted(self, ticket: Ticket, num_tokens: int) -> None:
        """`ticket` runs from now on, and has num_tokens known tokens to compute."""

    def left(self, ticket: Ticket) -> None:
        """`ticket`, still in its slot, runs no longer."""

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """The same slots, the first to be preempted first. `slots` come in the order in which
        they are served."""

    def hurries(self, first_waiting: Ticket | None) -> Ticket | None:
        """For whose prompt others stand back in this step: one that runs, or who is next."""

    def may_be_owed(self, ticket: Ticket) -> bool:
        """Whether anybody who runs may owe `ticket` anything now; if not, nobody is asked."""

    def owes(self, running: Ticket, ticket: Ticket) -> bool:
        """Whether `running` is left out of steps so that the prompt of `ticket` is computed."""

    def takes_place(self, running: Ticket, ticket: Ticket) -> bool:
        """Whether `running` may be preempted so that `ticket`, which waits, runs now."""


class FirstCome:
    """By arrival; the last to come is preempted first and, having come early, returns first."""

    makes_way = False

    def begin(self, state: RunningState, speed: SpeedEstimate, lengths: LengthHistory) -> None:
        """See Policy."""
        self._state, self._speed, self._lengths = state, speed, lengths
        self.hurried: list[Ticket] = []

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """Its number of arrival."""
        return (ticket.arrival,)

    def handicap_ms(self, ticket: Ticket) -> float:
        """None."""
        return 0.0

    def lane(self, ticket: Ticket) -> str:
        """All wait in one."""
        return ""

    def lane_opens(self, lane: str, others: Collection[str]) -> None:
        """No matter."""

    def lane_keys(self, lanes: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """There is but one."""
        return [()] * len(lanes)

    def rank(self, ticket: Ticket) -> tuple[float, ...]:
        """As in the queue."""
        return ticket.key

    def admitted(self, ticket: Ticket, num_tokens: int) -> None:
        """No matter."""

    def left(self, ticket: Ticket) -> None:
        """No matter."""

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Last served, first preempted; those that are nearly finished come after all others."""
        state, backwards = self._state, slots[::-1]
        left_tokens = state.longest[backwards] - state.goal[backwards]
        nearly_finished = left_tokens <= NEARLY_FINISHED_TOKENS
        return backwards[np.argsort(nearly_finished, kind="stable")]

    def hurries(self, first_waiting: Ticket | None) -> Ticket | None:
        """For nobody's."""
        return None

    def may_be_owed(self, ticket: Ticket) -> bool:
        """Where anybody makes way."""
        return self.makes_way

    def owes(self, running: Ticket, ticket: Ticket) -> bool:
        """Nobody anything."""
        return False

    def takes_place(self, running: Ticket, ticket: Ticket) -> bool:
        """Who runs goes on."""
        return False
