"""PriorityFirst, `priority`: the smallest `priority` first, as in vLLM, with aging.

Always holds: every request is served, because waiting makes up for priority.
"""

from __future__ import annotations

import math

from quire.scheduler.policy.policy import Policy
from quire.scheduler.sequence import SequenceState

# Waiting time that makes up for one level of priority.
LEVEL_MS = 10_000.0
# A level where waiting does not count: more than any request waits.
FOREVER_MS = 1e12


class PriorityFirst(Policy):
    """The smallest `priority` first; 10 s of waiting make up for one level.

    Running requests are served, and spared from preemption, in the same order. A waiting request
    preempts a running one that it precedes by a whole level, waiting counted.
    """

    has_priority_preemption = has_delays = True

    def __init__(self, aging: float = 1.0) -> None:
        self._level_ms = LEVEL_MS / aging if aging else math.inf

    def queue_key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return the arrival time, shifted by the priority."""
        if math.isinf(self._level_ms):
            return (sequence.request.priority, sequence.arrival)
        return (sequence.request.arrival_ms + self.delay_ms(sequence), sequence.arrival)

    def delay_ms(self, sequence: SequenceState) -> float:
        """Return the shift by the priority."""
        return sequence.request.priority * min(self._level_ms, FOREVER_MS)

    def preempts(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether `sequence` precedes `running` by a whole level."""
        level = 1.0 if math.isinf(self._level_ms) else self._level_ms
        return running.entry.key[0] - sequence.entry.key[0] >= level
