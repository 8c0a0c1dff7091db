"""Counts of accepted drafts by slot and position, and the lengths of drafts that pay: the plain
twins of the native DraftCounts and draft_lengths.

The probability that a draft is accepted is estimated from the request's own counts by position, as
an upper confidence bound, so that what is uncertain is tried and what fails is not; confidence
fades while nothing is tried, so that it is tried again. Requests without counts of their own have
the acceptance of all. A series of equal outcomes that the counts make unlikely replaces them, so
that a collapse is noticed within a few steps. Always holds: a position that was not tried is no
better than the first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

# Standard deviations between the estimate and its upper bound.
CONFIDENCE = 1.0
# Trials that the counts of a position remember.
MAX_TRIALS = 64.0
# What a step leaves of the counts, so that rejected positions are tried again.
FADE = 0.99
# Trials that the engine's experience with all requests counts for.
PRIOR_TRIALS = 2.0
# A series of equal outcomes less likely than this, by the counts, replaces them.
UNLIKELY = 0.02
# Rounds in which the rate of a step with drafts is found; two are enough for most steps.
MAX_ROUNDS = 8


class Trials(NamedTuple):
    """Drafts that were verified after accepted ones, and how many of them were accepted."""

    tried: Float64s
    accepted: Float64s


class PlainDraftCounts:
    """Of requests in `num_slots` slots, with at most `max_drafts` drafts a step."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._tried: Float64s = np.zeros((num_slots, max_drafts))
        self._accepted: Float64s = np.zeros((num_slots, max_drafts))
        # The last outcomes at the first position: so many were accepted (> 0) or not (< 0).
        self._series = np.zeros(num_slots, np.int64)
        # Of all requests, without and with predictions; at first one trial that succeeded, so that
        # drafts are tried at all.
        self._kinds = np.zeros(num_slots, np.intp)
        self._all = Trials(np.ones((2, max_drafts)), np.ones((2, max_drafts)))

    def begin(self, slot: int, predicts: bool) -> None:
        """Note that another request runs in `slot`; predicts: it brings a prediction."""
        self._kinds[slot] = predicts
        self._tried[slot] = self._accepted[slot] = 0.0
        self._series[slot] = 0

    def chances(self, slots: Index, num_steps: int, found: Float64s) -> None:
        """Fill found [B, K]: the probability that a draft and all before it are accepted.

        num_steps: steps since the last call, by which confidence fades.
        """
        fade = FADE**num_steps
        self._tried[slots] *= fade
        self._accepted[slots] *= fade
        trials = Trials(self._tried[slots], self._accepted[slots])
        prior = (self._all.accepted / self._all.tried)[self._kinds[slots]]
        bounds = upper_bounds(trials, prior)
        bounds = np.where(trials.tried < 1.0, np.minimum(bounds, bounds[:, :1]), bounds)
        found[:] = np.cumprod(bounds, axis=1, dtype=np.float64)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Count outcomes: of drafted[i] drafts the first accepted[i] were right."""
        columns = np.arange(self._max_drafts)
        succeeded = columns < accepted[:, None]
        tried = columns < np.minimum(accepted + 1, drafted)[:, None]
        self._notice_changes(slots, tried[:, 0], succeeded[:, 0])
        keep = np.where(tried, 1.0 - 1.0 / MAX_TRIALS, 1.0)
        self._tried[slots] = self._tried[slots] * keep + tried
        self._accepted[slots] = self._accepted[slots] * keep + succeeded
        for kind in (0, 1):
            of_kind = self._kinds[slots] == kind
            num_tried = np.add.reduce(tried[of_kind], axis=0)
            kept = (1.0 - 1.0 / MAX_TRIALS) ** num_tried
            self._all.tried[kind] *= kept
            self._all.tried[kind] += num_tried
            self._all.accepted[kind] *= kept
            self._all.accepted[kind] += np.add.reduce(succeeded[of_kind], axis=0)

    def _notice_changes(
        self, slots: Index, tried: NDArray[np.bool_], accepted: NDArray[np.bool_]
    ) -> None:
        """Forget counts that recent outcomes contradict."""
        series = self._series[slots]
        outcome = np.where(accepted, 1, -1)
        series = np.where(series * outcome > 0, series + outcome, outcome)
        series = np.where(tried, series, self._series[slots])
        self._series[slots] = series
        successes, trials = self._accepted[slots, 0], self._tried[slots, 0]
        equal = np.where(series > 0, successes, trials - successes)  # such outcomes so far
        likelihood = ((equal + 1.0) / (trials + 1.0)) ** np.abs(series)
        changed = tried & (likelihood < UNLIKELY)
        self._tried[slots[changed]] = self._accepted[slots[changed]] = 0.0
        self._tried[slots[changed], 0] = np.abs(series[changed])
        self._accepted[slots[changed], 0] = np.maximum(series[changed], 0)


def upper_bounds(trials: Trials, prior: Float64s) -> Float64s:
    """Return upper confidence bounds (Wilson) of acceptance, by request and position [B, K].

    prior [B, K]: acceptance of all such requests, which counts as PRIOR_TRIALS trials.
    """
    num = trials.tried + PRIOR_TRIALS
    mean = np.clip((trials.accepted + PRIOR_TRIALS * prior) / num, 0.0, 1.0)
    square = CONFIDENCE * CONFIDENCE
    spread = CONFIDENCE * np.sqrt(mean * (1.0 - mean) / num + square / (4.0 * num * num))
    bounds: Float64s = (mean + square / (2.0 * num) + spread) / (1.0 + square / num)
    return np.minimum(bounds, 1.0)


def draft_lengths(
    chances: Float64s,
    limits: Int32s,
    draft_ms: Float64s,
    step_ms: float,
    step_tokens: float,
    once_ms: float,
    row_ms: float,
    margin: float,
    lengths: Int32s,
) -> None:
    """Fill lengths [B]: the numbers of drafts that yield most tokens per millisecond.

    chances [B, K] fall along a row. At a rate of tokens per millisecond, each draft is worth its
    chance less what its time would yield at that rate. The drafts worth more than nothing raise the
    rate of the step (Dinkelbach's method); the rate rises until the choice stands. once_ms, row_ms:
    see StepCost. margin: how much more a draft must promise than it costs.
    """
    allowed = np.arange(chances.shape[1]) < limits[:, None]
    price_ms = (margin * np.maximum(draft_ms, 1e-9))[:, None]
    step_ms = max(step_ms, 1e-9)
    rate = step_tokens / step_ms
    lengths[:] = 0
    for _ in range(MAX_ROUNDS):
        is_worth = (chances > rate * price_ms) & allowed
        gains = np.add.reduce((chances - rate * price_ms) * is_worth, axis=1)
        takes = gains > margin * rate * row_ms
        is_worth &= takes[:, None]
        found = np.add.reduce(is_worth, axis=1, dtype=np.int32)
        tokens = step_tokens + float(np.add.reduce(chances * is_worth, axis=None))
        extra_ms = once_ms + np.count_nonzero(takes) * row_ms + float(draft_ms @ found)
        new_rate = tokens / (step_ms + margin * extra_ms)
        if not takes.any() or new_rate <= rate:
            return
        settled = bool((found == lengths).all())
        lengths[:], rate = found, new_rate
        if settled:
            return
