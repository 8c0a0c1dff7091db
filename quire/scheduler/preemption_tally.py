"""PreemptionTally: how many requests were preempted, why, how they came back, and what that cost.

Counts only. The cost of a preemption is told when its request runs again: predicted milliseconds
of what must be computed anew, and those it waited for blocks from a tier.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import Any

from quire.base.records import PREEMPTION_COSTS_MS
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.ticket import Ticket


class Why(StrEnum):
    """What the blocks, or the slot, of a preempted request were wanted for."""

    ANSWER = "answer"  # somebody's next token
    PROMPT = "prompt"  # somebody's prompt
    TURN = "turn"  # somebody's, whose turn was long before
    CEILING = "ceiling"  # for nothing: its tenant had more than it may


class PreemptionTally:
    """All zero at first."""

    def __init__(self) -> None:
        self._by_why = dict.fromkeys(Why, 0)
        self._moved = 0
        self._costs_ms = 0.0
        self._counts = [0] * (len(PREEMPTION_COSTS_MS) + 1)

    def preempted(self, why: Why, *, moved: bool) -> None:
        """A request lost its slot. moved: its blocks go to the tier, and else it will be computed
        again."""
        self._by_why[why] += 1
        self._moved += moved

    def returned(self, ticket: Ticket, start: int, speed: SpeedEstimate) -> None:
        """A preempted request runs again, and computes from position `start` on."""
        cost_ms = ticket.waited_ms + speed.span_ms(start, max(ticket.had_computed, start))
        ticket.had_computed, ticket.waited_ms = 0, 0.0
        self._costs_ms += cost_ms
        self._counts[bisect_left(PREEMPTION_COSTS_MS, cost_ms)] += 1

    def stats(self) -> dict[str, Any]:
        """As fields of EngineStats."""
        return {
            "preemptions_total": sum(self._by_why.values()),
            "preemptions_moved_total": self._moved,
            "preemptions_for_prompts_total": self._by_why[Why.PROMPT],
            "preemptions_for_turns_total": self._by_why[Why.TURN],
            "preemptions_for_ceilings_total": self._by_why[Why.CEILING],
            "preemption_cost_counts": tuple(self._counts),
            "preemption_cost_ms_total": self._costs_ms,
        }
