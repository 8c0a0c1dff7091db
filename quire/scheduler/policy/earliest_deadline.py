"""EarliestDeadline, `edf`: requests in the order in which their objectives are due.

Always holds: a request without an objective is due some time after its arrival, so it is served.
"""

from __future__ import annotations

import math

from quire.scheduler.policy.policy import Policy
from quire.scheduler.policy.shortest_first import SHARED_BY
from quire.scheduler.sequence import SequenceState

# When a request without an objective is due, and one that missed its first token's is due again.
PATIENCE_MS = 30_000.0


class EarliestDeadline(Policy):
    """By `ttft_slo_ms`, or `deadline_ms` less the predicted time of the answer.

    A request without an objective counts as one that wants its first token in 30 s. One that has
    missed the objective of its first token ranks behind those that can still meet theirs.
    """

    uses_lengths = has_delays = True

    def __init__(self, aging: float = 1.0) -> None:
        self._patience_ms = PATIENCE_MS / aging if aging else math.inf

    def queue_key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return when the request must be admitted."""
        return (sequence.request.arrival_ms + self.delay_ms(sequence), sequence.arrival)

    def delay_ms(self, sequence: SequenceState) -> float:
        """Return the time it has."""
        request, within_ms = sequence.request, math.inf
        if request.ttft_slo_ms is not None:
            missed_ms = self._patience_ms if sequence.objectives.missed_first_token else 0.0
            within_ms = request.ttft_slo_ms + missed_ms
        if request.deadline_ms is not None:
            tokens = sequence.entry.likely_tokens
            depth = sequence.num_prompt_tokens + tokens / 2
            step_ms = self._speed.step_ms(SHARED_BY, SHARED_BY * depth)
            within_ms = min(within_ms, request.deadline_ms - tokens * step_ms)
        return self._patience_ms if math.isinf(within_ms) else within_ms
