"""PreemptionStats: how many requests were preempted, why, how they returned, and at what cost.

Counts only. The cost of a preemption is known when its request runs again: the predicted
milliseconds of what must be recomputed, and those it waited for blocks from a tier.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum
from typing import Any

from quire.base.engine_stats import PREEMPTION_COSTS_MS
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.sequence import SequenceState


class PreemptionReason(StrEnum):
    """What the blocks, or the slot, of a preempted request were needed for."""

    ANSWER = "answer"  # the next token of another request
    PROMPT = "prompt"  # the prompt of another request
    TURN = "turn"  # a waiting request that ranks far before it
    CEILING = "ceiling"  # none: its tenant was above its ceiling


class PreemptionStats:
    """All zero at first. fields: the counts as fields of EngineStats, renewed with each event."""

    def __init__(self, speed: SpeedEstimate) -> None:
        self._speed = speed
        self._by_reason = dict.fromkeys(PreemptionReason, 0)
        self._moved = 0
        self._costs_ms = 0.0
        self._counts = [0] * (len(PREEMPTION_COSTS_MS) + 1)
        self.fields = self._fields()

    def preempted(self, reason: PreemptionReason, *, moved: bool) -> None:
        """Count a request that lost its slot.

        moved: its blocks go to the tier; otherwise they will be recomputed.
        """
        self._by_reason[reason] += 1
        self._moved += moved
        self.fields = self._fields()

    def returned(self, sequence: SequenceState, start: int) -> None:
        """Count a preempted request that runs again and computes from position `start` on."""
        lost = sequence.preemption.had_computed
        cost_ms = sequence.kv.waited_ms + self._speed.span_ms(start, max(lost, start))
        sequence.preemption.had_computed, sequence.kv.waited_ms = 0, 0.0
        self._costs_ms += cost_ms
        self._counts[bisect_left(PREEMPTION_COSTS_MS, cost_ms)] += 1
        self.fields = self._fields()

    def _fields(self) -> dict[str, Any]:
        return {
            "preemptions_total": sum(self._by_reason.values()),
            "preemptions_moved_total": self._moved,
            "preemptions_for_prompts_total": self._by_reason[PreemptionReason.PROMPT],
            "preemptions_for_turns_total": self._by_reason[PreemptionReason.TURN],
            "preemptions_for_ceilings_total": self._by_reason[PreemptionReason.CEILING],
            "preemption_cost_counts": tuple(self._counts),
            "preemption_cost_ms_total": self._costs_ms,
        }
