"""PassTimes: how long a draft model's passes take, by the number of requests or tokens in them.

Learned from the passes themselves, in powers of two of requests. What is not used for a long time
drifts back to the best time seen, so that one slow pass does not end drafting for good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
# The weight of a new time; a longer one counts as at most twice the present estimate.
WEIGHT = 1 / 8
# How far an estimate moves towards the best time whenever it is read.
DRIFT = 1 / 512
# A pass counts as at most so many times as long as it usually is: something else may have held it
# up.
MAX_STALL_TIMES = 8.0


class PassTimes:
    """Of passes for up to `num_requests` requests. token_ms: of a token of a prompt; 0: unknown.
    call_ms: of a call beside its passes."""

    def __init__(self, num_requests: int) -> None:
        num_sizes = _size(num_requests) + 1
        self._ms: Float64s = np.zeros(num_sizes)  # 0: not known
        self._best: Float64s = np.zeros(num_sizes)
        self.token_ms = self.call_ms = 0.0
        self._best_call_ms = 0.0

    def note_pass(self, num_requests: int, num_tokens: int, ms: float) -> None:
        """Learn from a pass: of a draft if it has at most two tokens a request, else of tokens."""
        if num_tokens <= 2 * num_requests:
            self.note(num_requests, ms)
        else:
            self.note_tokens(num_tokens, ms)

    def counted_ms(self, num_requests: int, num_tokens: int, ms: float) -> float:
        """Return the milliseconds that a pass of `ms` counts for: at most MAX_STALL_TIMES its usual
        time. Called before the pass is noted."""
        usual_ms = max(num_tokens * self.token_ms, float(self._ms[_size(num_requests)]))
        return min(ms, MAX_STALL_TIMES * usual_ms) if usual_ms else ms

    def note(self, num_requests: int, ms: float) -> None:
        """Learn from a pass for `num_requests` requests."""
        at, ms = _size(num_requests), max(ms, 1e-6)
        old = self._ms[at]
        self._ms[at] = ms if not old else old + WEIGHT * (min(ms, 2.0 * old) - old)
        self._best[at] = ms if not old else min(ms, self._best[at])

    def note_tokens(self, num_tokens: int, ms: float) -> None:
        """Learn from a pass over `num_tokens` tokens of prompts."""
        old, new = self.token_ms, ms / num_tokens
        self.token_ms = new if not old else old + WEIGHT * (min(new, 2.0 * old) - old)

    def note_call(self, ms: float) -> None:
        """Learn from a call that took so long beside its passes."""
        old, ms = self.call_ms, max(ms, 1e-6)
        self.call_ms = ms if not old else old + WEIGHT * (min(ms, 2.0 * old) - old)
        self._best_call_ms = ms if not old else min(ms, self._best_call_ms)

    def max_tokens(self, ms: float, limit: int) -> int:
        """Return how many tokens of prompts take about `ms`, at most `limit`."""
        if self.token_ms * limit <= ms:
            return limit
        return int(ms / self.token_ms)

    def settle(self) -> None:
        """Take the best times seen so far: those of a warm machine."""
        self._ms[:], self.call_ms = self._best, self._best_call_ms

    def table(self, num_requests: int) -> Float64s:
        """Return the milliseconds of a pass for 0 to `num_requests` requests; 0 if none is known.

        Sizes between known ones are interpolated.
        """
        self._ms -= DRIFT * (self._ms - self._best)
        self.call_ms -= DRIFT * (self.call_ms - self._best_call_ms)
        known = self._ms.nonzero()[0]
        if not len(known):
            return np.zeros(num_requests + 1)
        sizes = np.log2(np.maximum(np.arange(num_requests + 1), 1))
        table: Float64s = np.interp(sizes, known, self._ms[known])
        table[0] = 0.0
        return table


def _size(num_requests: int) -> int:
    """Return the rounded binary logarithm."""
    return round(float(np.log2(max(num_requests, 1))))
