"""Policy: in which order requests are admitted, and who gives up blocks when they run out.

A policy sees tickets and slots, never blocks or budgets. It need not care for progress: the
scheduler asks for victims only among requests admitted after the one that lacks blocks, so the
oldest running request always gets on, whatever the policy answers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.ticket import Ticket


class Policy(Protocol):
    """Order of the queue and choice of victim."""

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """Waiting requests are admitted by ascending key. Asked whenever one enters the queue."""

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """The same slots, the first to be preempted first. `slots` come in order of admission."""


class FirstCome:
    """By arrival; the last admitted is preempted first and, having arrived early, returns first."""

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """Its number of arrival."""
        return (ticket.arrival,)

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Last admitted, first preempted."""
        return slots[::-1]
