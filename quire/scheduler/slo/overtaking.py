"""Overtaking: how much longer one waits because others that come later go before it.

Takes the requests of late as a sample of those to come: their pace, their work, and the policy's
handicap of each. Knows no queue and no clock. Always holds: under a policy that passes nobody a
wait stays what it is; one that those who come would prolong for ever is prediction as a long one.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

# The sample: so many that came last, and no fewer than the least.
_MOST, _LEAST = 128, 8
# Those who come may make a wait so many times as long, and no longer is prediction.
_LONGEST = 100.0


class Overtaking:
    """Nobody has come yet."""

    def __init__(self) -> None:
        # When each came, its handicap (see Policy) and its work, in the machine's milliseconds.
        self._came: deque[tuple[float, float, float]] = deque(maxlen=_MOST)
        self._least_ms = self._most_ms = 0.0  # of all handicaps ever

    def may_overtake(self, delay_ms: float) -> bool:
        """Whether anybody ever passes another, now that one of that handicap has come."""
        return delay_ms != 0.0 or self._least_ms != self._most_ms

    def note(self, arrival_ms: float, delay_ms: float, work_ms: float) -> None:
        """A request was let in."""
        self._came.append((arrival_ms, delay_ms, work_ms))
        self._least_ms = min(self._least_ms, delay_ms)
        self._most_ms = max(self._most_ms, delay_ms)

    def extended_ms(self, wait_ms: float, delay_ms: float) -> float:
        """What becomes of a wait of `wait_ms`, which begins now, of one with that handicap."""
        if self._least_ms == self._most_ms or wait_ms <= 0 or len(self._came) < _LEAST:
            return wait_ms
        came = np.array(self._came)
        span_ms = float(came[:, 0].max() - came[:, 0].min())
        # For so long those like each of them still go before it: who comes later than that waits
        # behind it. Sorted, the share of time that they take falls step by step.
        passes_ms = delay_ms - came[:, 1]
        passes = passes_ms > 0
        if span_ms <= 0 or not passes.any():
            return wait_ms
        order = np.argsort(passes_ms[passes])
        until_ms = passes_ms[passes][order]
        shares = came[passes, 2][order][::-1].cumsum()[::-1] / span_ms
        return _first_done(wait_ms, until_ms.tolist(), shares.tolist())


def _first_done(wait_ms: float, until_ms: list[float], shares: list[float]) -> float:
    """When work of wait_ms is done, where up to until_ms[i] a share of shares[i] goes elsewhere."""
    left_ms, now_ms, longest_ms = wait_ms, 0.0, _LONGEST * wait_ms
    for end_ms, share in zip(until_ms, shares, strict=True):
        done_ms = now_ms + left_ms / (1.0 - share) if share < 1.0 else math.inf
        if done_ms <= end_ms or end_ms >= longest_ms:
            return min(done_ms, longest_ms)
        left_ms -= (end_ms - now_ms) * (1.0 - share)
        now_ms = end_ms
    return min(now_ms + left_ms, longest_ms)
