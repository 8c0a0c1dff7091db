"""Overtaking: how much longer a request waits because later arrivals overtake it.

Takes recent requests as a sample of those to come: their arrival rate, their work, and the delay
that the policy adds to each. Knows no queue and no clock. Always holds: a wait does not change
under a policy without overtaking; one that later arrivals would extend for ever is predicted as a
long one.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

# The sample: so many that came last; with fewer than the minimum no wait is extended.
_MAX_SAMPLE, _MIN_SAMPLE = 128, 8
# Later arrivals make a predicted wait at most so many times as long.
_LONGEST = 100.0


class Overtaking:
    """Empty at first."""

    def __init__(self) -> None:
        # When each arrived, its delay (see Order) and its work, in device milliseconds.
        self._came: deque[tuple[float, float, float]] = deque(maxlen=_MAX_SAMPLE)
        self._min_delay_ms = self._max_delay_ms = 0.0  # of all delays ever

    def may_overtake(self, delay_ms: float) -> bool:
        """Return whether any request overtakes another, now that one with delay_ms has come."""
        return delay_ms != 0.0 or self._min_delay_ms != self._max_delay_ms

    def note(self, arrival_ms: float, delay_ms: float, work_ms: float) -> None:
        """Add an accepted request to the sample."""
        self._came.append((arrival_ms, delay_ms, work_ms))
        self._min_delay_ms = min(self._min_delay_ms, delay_ms)
        self._max_delay_ms = max(self._max_delay_ms, delay_ms)

    def extended_ms(self, wait_ms: float, delay_ms: float) -> float:
        """Return how long a wait of `wait_ms` becomes for a request with delay_ms."""
        if (
            self._min_delay_ms == self._max_delay_ms
            or wait_ms <= 0
            or len(self._came) < _MIN_SAMPLE
        ):
            return wait_ms
        came = np.array(self._came)
        span_ms = float(came[:, 0].max() - came[:, 0].min())
        # For so long those like each of them still overtake it: a later arrival waits
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
    """Return when work of wait_ms is done.

    Up to until_ms[i] a share of shares[i] goes elsewhere.
    """
    left_ms, now_ms, longest_ms = wait_ms, 0.0, _LONGEST * wait_ms
    for end_ms, share in zip(until_ms, shares, strict=True):
        done_ms = now_ms + left_ms / (1.0 - share) if share < 1.0 else math.inf
        if done_ms <= end_ms or end_ms >= longest_ms:
            return min(done_ms, longest_ms)
        left_ms -= (end_ms - now_ms) * (1.0 - share)
        now_ms = end_ms
    return min(now_ms + left_ms, longest_ms)
