"""SafetyMargin: by how much predictions are exceeded, learned from their outcomes.

A prediction that is right in the middle is too short for half of the requests it accepts; with its
margin it is kept by all but one in twenty. Each kind of prediction has a margin of its own: first
token or whole answer, with or without a wait for a slot, and how long it is, within a factor of
two. Knows no requests and no clock. Always holds: without experience a prediction is taken as it
is; no margin is below 1 or above the maximum; one that only rejects shrinks, so that a request is
accepted again and shows what is true now.
"""

from __future__ import annotations

import math

from quire.scheduler.sequence_parts import Prediction

# The share of predictions that are to be kept with their margin.
CONFIDENCE = 0.95
# A prediction that was not kept multiplies its margin by e to this, times the confidence; one that
# was divides it by so much less that the two balance where the confidence is right.
_STEP = 0.1
_MAX_TIMES = 10.0


class SafetyMargin:
    """Empty at first."""

    def __init__(self) -> None:
        # Logarithms, by kind of prediction: a few dozen at most.
        self._margins: dict[tuple[bool, bool, int], float] = {}

    def times(self, prediction: Prediction) -> float:
        """Return how many times as long as predicted it may take."""
        return math.exp(self._margins.get(_kind(prediction), 0.0))

    def came(self, prediction: Prediction, now_ms: float) -> None:
        """Learn from what was predicted and has come, or was given up, at now_ms."""
        took_ms = now_ms - prediction.at_ms
        kept = took_ms <= prediction.ms * self.times(prediction)
        self._move(prediction, CONFIDENCE - 1.0 if kept else CONFIDENCE)

    def refused(self, prediction: Prediction) -> None:
        """Learn from a rejection caused only by the margin: its outcome stays unknown."""
        self._move(prediction, CONFIDENCE - 1.0)

    def _move(self, prediction: Prediction, share: float) -> None:
        kind = _kind(prediction)
        moved = self._margins.get(kind, 0.0) + _STEP * share
        self._margins[kind] = min(max(moved, 0.0), math.log(_MAX_TIMES))


def _kind(prediction: Prediction) -> tuple[bool, bool, int]:
    return prediction.is_end, prediction.waits, math.frexp(prediction.ms)[1]
