"""Control: how many drafts a request gets in a step.

A draft is worth verifying if the tokens expected from it cost less than tokens cost without it:
if P / draft_ms exceeds step_tokens / step_ms, where P is the probability that the draft and all
before it are accepted, and draft_ms includes the time to compute it where a draft model does. P is
estimated from the request's own counts of accepted drafts by position, as an upper confidence
bound, so that what is uncertain is tried and what fails is not; confidence fades while nothing is
tried, so that it is tried again. A pure function of counts and predicted times: no clock. Always
holds: no choice changes an answer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

# A draft must promise this much more than it costs.
MARGIN = 1.1
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


class Passes(NamedTuple):
    """Passes of a draft model: each drafts a token for some requests, so these share its time.

    ms: of a pass for 0, 1, ... requests, up to all of `rows`. rows: requests that are drafted so.
    """

    ms: Float64s
    rows: NDArray[np.bool_]


class StepCost(NamedTuple):
    """Predicted milliseconds of a step without drafts, the tokens it yields, and what one draft
    adds to the step, by request. passes: what making the drafts takes besides; None: nothing.
    num_steps: steps since the control was asked last."""

    step_ms: float
    step_tokens: int
    draft_ms: Float64s
    passes: Passes | None = None
    num_steps: int = 1

    def with_passes(self) -> Float64s:
        """Return what one draft adds, its share of a pass for all requests included."""
        if self.passes is None:
            return self.draft_ms
        ms, rows = self.passes
        num = int(np.count_nonzero(rows))
        share_ms: Float64s = rows * (ms[num] / max(num, 1))
        return self.draft_ms + share_ms


class Control(Protocol):
    """Chooses lengths of drafts, by slot."""

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Note that another request runs in `slot`; predicts: it brings a prediction."""

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """Return how many drafts each of `slots` should get, at most limits[i].

        cost: None where it is not known: about as in the last step.
        """

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Note that of drafted[i] drafts the first accepted[i] were right."""


class FixedControl:
    """Always as many drafts as allowed, at most `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = np.int32(num_drafts)

    def begin(self, slot: int, *, predicts: bool) -> None:
        """Do nothing."""

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        return np.minimum(limits, self._num_drafts)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Do nothing."""


class Trials(NamedTuple):
    """Drafts that were verified after accepted ones, and how many of them were accepted."""

    tried: Float64s
    accepted: Float64s


class AdaptiveControl:
    """For requests in `num_slots` slots, with at most `max_drafts` drafts a step."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._tried: Float64s = np.zeros((num_slots, max_drafts))
        self._accepted: Float64s = np.zeros((num_slots, max_drafts))
        # The last outcomes at the first position: so many were accepted (> 0) or not (< 0).
        self._series = np.zeros(num_slots, np.int64)
        self._last_cost: tuple[float, int, float] | None = None  # draft_ms is the mean
        # Of all requests, without and with predictions; at first one trial that succeeded, so that
        # drafts are tried at all.
        self._kinds = np.zeros(num_slots, np.intp)
        self._all = Trials(np.ones((2, max_drafts)), np.ones((2, max_drafts)))

    def begin(self, slot: int, *, predicts: bool) -> None:
        """See Control."""
        self._kinds[slot] = predicts
        self._tried[slot] = self._accepted[slot] = 0.0
        self._series[slot] = 0

    def limits(self, slots: Index, limits: Int32s, cost: StepCost | None) -> Int32s:
        """See Control."""
        if cost is not None:
            draft_ms = float(np.mean(cost.with_passes()))
            self._last_cost = cost.step_ms, cost.step_tokens, draft_ms
        elif self._last_cost is None:
            return limits
        else:
            step_ms, step_tokens, draft_ms = self._last_cost
            cost = StepCost(step_ms, step_tokens, np.full(len(slots), draft_ms))
        fade = FADE**cost.num_steps
        self._tried[slots] *= fade
        self._accepted[slots] *= fade
        trials = Trials(self._tried[slots], self._accepted[slots])
        prior = (self._all.accepted / self._all.tried)[self._kinds[slots]]
        bounds = upper_bounds(trials, prior)
        # A position that was not tried is no better than the first.
        bounds = np.where(trials.tried < 1.0, np.minimum(bounds, bounds[:, :1]), bounds)
        chances: Float64s = np.cumprod(bounds, axis=1, dtype=np.float64)
        return best_lengths(chances, limits, cost)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """See Control."""
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


def best_lengths(chances: Float64s, limits: Int32s, cost: StepCost) -> Int32s:
    """Return the lengths of drafts [B] that yield most tokens per millisecond.

    chances [B, K]: the probability that a draft and all before it are accepted; falls along a row.
    Drafts are added in the order of their yield while each raises the rate of the whole step.
    """
    draft_ms = cost.with_passes()
    columns = np.arange(chances.shape[1])
    yields = np.where(columns < limits[:, None], chances, 0.0)
    yields = yields / (MARGIN * np.maximum(draft_ms, 1e-9))[:, None]
    rate = cost.step_tokens / max(cost.step_ms, 1e-9)
    if float(yields.max(initial=0.0)) <= rate:
        return np.zeros(len(limits), np.int32)
    order = np.argsort(-yields, axis=None, kind="stable")
    each_ms = np.repeat(draft_ms, chances.shape[1])[order]
    each_token = chances.reshape(-1)[order]
    tokens_before = cost.step_tokens + np.cumsum(each_token) - each_token
    ms_before = cost.step_ms + np.cumsum(each_ms) - each_ms
    raises = yields.reshape(-1)[order] * ms_before > tokens_before
    num = len(order) if raises.all() else int(raises.argmin())
    chosen = np.bincount(order[:num] // chances.shape[1], minlength=len(limits)).astype(np.int32)
    return chosen if cost.passes is None else _without_poor_passes(chosen, chances, cost, rate)


def _without_poor_passes(lengths: Int32s, chances: Float64s, cost: StepCost, rate: float) -> Int32s:
    """Return `lengths` without the last passes that too few requests share to pay for them."""
    assert cost.passes is not None, "drafts are computed"
    ms, rows = cost.passes
    for place in range(int(lengths[rows].max(initial=0)) - 1, -1, -1):
        drafted = rows & (lengths > place)
        pass_ms = ms[np.count_nonzero(drafted)] + float(np.add.reduce(cost.draft_ms[drafted]))
        if float(np.add.reduce(chances[drafted, place])) > MARGIN * rate * pass_ms:
            break
        lengths[drafted] = place
    return lengths
