"""ShortestFirst, `sjf`: shortest job first, by predicted work, with aging.

Always holds: a request is overtaken only by those that arrive within a bounded time.
"""

from __future__ import annotations

import math

from quire.scheduler.policy.policy import Policy
from quire.scheduler.policy.priority import FOREVER_MS
from quire.scheduler.sequence import SequenceState

# Waiting time that makes up for one more millisecond of work.
STRETCH = 1000.0
# Rows that a step's fixed cost is assumed to be shared by.
SHARED_BY = 8


class ShortestFirst(Policy):
    """The least predicted work first: the prompt, and as many output tokens as are likely.

    Output lengths are learned from answers to prompts of such a length by the same tenant. A
    request is overtaken only by those that arrive within 1,000 times the work they save.
    """

    uses_lengths = has_delays = True

    def __init__(self, aging: float = 1.0) -> None:
        self._stretch = STRETCH / aging if aging else math.inf

    def queue_key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return the arrival time, shifted by the work."""
        if math.isinf(self._stretch):
            return (self.work_ms(sequence), sequence.arrival)
        return (sequence.request.arrival_ms + self.delay_ms(sequence), sequence.arrival)

    def delay_ms(self, sequence: SequenceState) -> float:
        """Return the shift by the work."""
        return self.work_ms(sequence) * min(self._stretch, FOREVER_MS)

    def work_ms(self, sequence: SequenceState) -> float:
        """Return the predicted device milliseconds, less what is generated already."""
        prompt, known = sequence.num_prompt_tokens, len(sequence.token_ids)
        left = sequence.entry.likely_tokens
        speed = self._speed
        each_ms = speed.step_ms(SHARED_BY, SHARED_BY * (known + left / 2)) / SHARED_BY
        return speed.span_ms(0, prompt) + left * each_ms
