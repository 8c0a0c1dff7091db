"""Counts of accepted drafts by slot and position, and the lengths of drafts that pay: the plain
twins of the native DraftCounts and draft_lengths.

The probability that a draft is accepted is estimated by position from the request's own counts and
from those of all requests, which weigh the more the less requests differ: the beta-binomial model,
with the correlation within requests measured at the end of each. The estimate is an upper
confidence bound; where requests differ, it is farther above the mean, so that each of them is
tried. What is not tried fades, towards acceptance, so that it is tried again. Positions are tried
one after the other, up to twice as far as any request has come. A series of equal outcomes that all
this makes unlikely replaces the request's counts, and what others experienced counts little for it
from then on, so that a collapse is noticed within a few steps. Drafts that follow a long match are
a kind of their own: a text that repeats itself continues so nearly always, and as deep as it goes,
so that all positions are tried at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]

# Standard deviations between the estimate and its upper bound, where requests are alike and where
# they differ most.
MIN_CONFIDENCE, MAX_CONFIDENCE = 0.2, 1.0
# Trials that the experience with all requests counts for, where they differ most and where they are
# alike.
MIN_PRIOR_TRIALS, MAX_PRIOR_TRIALS = 2.0, 16.0
# Trials that the counts of a position remember.
MAX_TRIALS = 64.0
# What a step leaves of the counts, so that rejected positions are tried again.
FADE = 0.99
# Trials of a request from which on it says how much requests differ, and the weight of one.
MIN_TRIALS, ENDED_WEIGHT = 4.0, 0.1
# Fewer trials are none: positions behind such a one are not known.
FEW_TRIALS = 0.5
# A series of equal outcomes less likely than this, by the counts, replaces them.
UNLIKELY = 0.005
# Rounds in which the rate of a step with drafts is found; two are enough for most steps.
MAX_ROUNDS = 8


# Kinds of drafts, each with experience of its own: of a request's text, of a request that brings a
# prediction, and those that follow a long match, which are right far more often than others.
OF_TEXT, PREDICTED, LONG_MATCHES = range(3)
NUM_KINDS = 3


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
        # Of all requests, by kind of drafts.
        self._kinds = np.zeros(num_slots, np.intp)
        self._all = Trials(np.zeros((NUM_KINDS, max_drafts)), np.zeros((NUM_KINDS, max_drafts)))
        self._correlation = NUM_KINDS * [0.0]  # of two outcomes of a slot
        self._changed = np.zeros(num_slots, np.bool_)  # outcomes contradicted all experience

    def begin(self, slot: int, kind: int) -> None:
        """Note that another request runs in `slot`, with drafts of a kind."""
        self._learn_correlation(slot)
        self._kinds[slot] = kind
        self._tried[slot] = self._accepted[slot] = 0.0
        self._series[slot] = 0
        self._changed[slot] = False

    def chances(self, slots: Index, num_steps: int, found: Float64s) -> None:
        """Fill found [B, K]: the probability that a draft and all before it are accepted.

        num_steps: steps since the last call, by which confidence fades.
        """
        fade = FADE**num_steps
        self._tried[slots] *= fade
        self._accepted[slots] *= fade
        columns = np.arange(self._max_drafts)
        for kind in np.unique(self._kinds[slots]).tolist():
            rows = self._kinds[slots] == kind
            self._all.tried[kind] *= fade
            self._all.accepted[kind] *= fade
            trials = Trials(self._tried[slots[rows]], self._accepted[slots[rows]])
            weights = self._prior_trials(slots[rows])
            differ = (MAX_PRIOR_TRIALS - weights) / (MAX_PRIOR_TRIALS - MIN_PRIOR_TRIALS)
            more = np.where(self._changed[slots[rows]], 0.0, MAX_CONFIDENCE - MIN_CONFIDENCE)
            confidence = MIN_CONFIDENCE + more * differ
            bounds = upper_bounds(trials, self._prior(kind), weights[:, None], confidence[:, None])
            chances = np.cumprod(bounds, axis=1, dtype=np.float64)
            depth = int(np.count_nonzero(self._all.tried[kind] > FEW_TRIALS))
            if kind == LONG_MATCHES:
                depth = self._max_drafts
            found[rows] = np.where(columns < 2 * depth + 1, chances, 0.0)

    def _prior(self, kind: int) -> Float64s:
        """Return the acceptance of all requests by position, near that of the position before where
        little was tried."""
        mean, means = 1.0, []
        for tried, accepted in zip(
            self._all.tried[kind].tolist(), self._all.accepted[kind].tolist(), strict=True
        ):
            mean = (accepted + mean) / (tried + 1.0)
            means.append(mean)
        return np.array(means)

    def _prior_trials(self, slots: Index) -> Float64s:
        """Return how many trials the experience with all requests counts for, by slot."""
        correlation = np.array(self._correlation)[self._kinds[slots]]
        trials = 1.0 / np.maximum(correlation, 1.0 / (MAX_PRIOR_TRIALS + 1.0)) - 1.0
        trials = np.where(self._changed[slots], MIN_PRIOR_TRIALS, trials)
        return np.maximum(trials, MIN_PRIOR_TRIALS)

    def _learn_correlation(self, slot: int) -> None:
        """Learn from a request that has ended how much more such requests differ than chance."""
        kind, tried = int(self._kinds[slot]), float(self._tried[slot, 0])
        if tried < MIN_TRIALS:
            return
        mean = float(self._prior(kind)[0])
        variance = max(mean * (1.0 - mean), 0.01)
        error = float(self._accepted[slot, 0]) - tried * mean
        found = (error * error / (tried * variance) - 1.0) / (tried - 1.0)
        known = self._correlation[kind]
        self._correlation[kind] = known + ENDED_WEIGHT * (min(found, 1.0) - known)

    def verified(self, slots: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Count outcomes: of drafted[i] drafts the first accepted[i] were right."""
        columns = np.arange(self._max_drafts)
        succeeded = columns < accepted[:, None]
        tried = columns < np.minimum(accepted + 1, drafted)[:, None]
        self._notice_changes(slots, tried[:, 0], succeeded[:, 0])
        keep = np.where(tried, 1.0 - 1.0 / MAX_TRIALS, 1.0)
        self._tried[slots] = self._tried[slots] * keep + tried
        self._accepted[slots] = self._accepted[slots] * keep + succeeded
        for kind in range(NUM_KINDS):
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
        rate = (self._all.accepted[:, 0] + 1.0) / (self._all.tried[:, 0] + 1.0)
        rate, weights = rate[self._kinds[slots]], self._prior_trials(slots)
        successes, failures = successes + weights * rate, trials - successes + weights * (1 - rate)
        equal = np.where(series > 0, successes, failures)  # such outcomes as far as known
        likelihood = ((equal + 1.0) / (trials + weights + 1.0)) ** np.abs(series)
        changed = tried & (likelihood < UNLIKELY)
        self._changed[slots[changed]] = True
        self._tried[slots[changed]] = self._accepted[slots[changed]] = 0.0
        self._tried[slots[changed], 0] = np.abs(series[changed])
        self._accepted[slots[changed], 0] = np.maximum(series[changed], 0)


def upper_bounds(
    trials: Trials, prior: Float64s, prior_trials: float | Float64s, confidence: float | Float64s
) -> Float64s:
    """Return upper confidence bounds (Wilson) of acceptance, by request and position [B, K].

    prior [K]: acceptance of all such requests, which counts as prior_trials trials.
    """
    num = trials.tried + prior_trials
    mean = np.clip((trials.accepted + prior_trials * prior) / num, 0.0, 1.0)
    square = confidence * confidence
    spread = confidence * np.sqrt(mean * (1.0 - mean) / num + square / (4.0 * num * num))
    bounds: Float64s = (mean + square / (2.0 * num) + spread) / (1.0 + square / num)
    return np.minimum(bounds, 1.0)


def draft_lengths(
    chances: Float64s,
    limits: Int32s,
    draft_ms: Float64s,
    added_ms: Float64s,
    step_ms: float,
    step_tokens: float,
    once_ms: float,
    row_ms: float,
    margin: float,
    lengths: Int32s,
) -> float:
    """Fill lengths [B]: the numbers of drafts that yield most tokens per millisecond; return by how
    many times these rise, with the margin.

    chances [B, K] fall along a row. added_ms: what 0, 1, 2 ... drafts in all add to the step, never
    falling; further ones as the last. draft_ms [B]: and what each takes by its request. once_ms,
    row_ms: see StepCost. margin: how much more drafts must promise than they cost.

    At a rate of tokens per millisecond, a number of drafts is worth their chances less what their
    time would yield at that rate. Of all numbers, each with the likeliest drafts, the one worth
    most is taken. It raises the rate of the step (Dinkelbach's method); the rate rises until the
    choice stands.
    """
    step_ms = max(step_ms, 1e-9)
    plain_rate = rate = step_tokens / step_ms
    lengths[:] = 0
    for _ in range(MAX_ROUNDS):
        price = margin * rate
        blocks = [
            block
            for row in range(len(limits))
            for block in _blocks_of(
                row, chances[row, : limits[row]].tolist(), price * draft_ms[row], price * row_ms
            )
        ]
        blocks.sort(key=lambda block: -block.value)
        gain, num_drafts, best, num_best = 0.0, 0, 0.0, 0
        for number, block in enumerate(blocks, start=1):
            gain += block.value * block.num_drafts
            num_drafts += block.num_drafts
            worth = gain - price * (once_ms + added_by(added_ms, num_drafts))
            if worth > best:
                best, num_best = worth, number
        if not num_best:
            break
        found = np.zeros_like(lengths)
        for block in blocks[:num_best]:
            found[block.row] += block.num_drafts
        tokens, extra_ms = step_tokens, once_ms + added_by(added_ms, int(np.add.reduce(found)))
        for row, length in enumerate(found.tolist()):
            expected = 0.0
            for chance in chances[row, :length].tolist():
                expected += chance
            tokens += expected
            extra_ms += length * float(draft_ms[row]) + (length > 0) * row_ms
        new_rate = tokens / (step_ms + margin * extra_ms)
        if new_rate <= rate:
            break
        settled = bool((found == lengths).all())
        lengths[:], rate = found, new_rate
        if settled:
            break
    return rate / plain_rate if plain_rate > 0.0 else 1.0


class _Block(NamedTuple):
    """The next drafts of a row that are taken together, each worth `value` at the present rate."""

    value: float
    row: int
    num_drafts: int


def _blocks_of(row: int, chances: list[float], each: float, once: float) -> list[_Block]:
    """Return blocks with falling values above 0. The first has as many drafts as spread what the
    row costs best: `once`, and `each` for a draft."""
    total, value, num_first = -once, 0.0, 0
    for num, chance in enumerate(chances, start=1):
        total += chance - each
        if total / num >= value:
            value, num_first = total / num, num
    if not num_first or value <= 0.0:
        return []
    rest = [_Block(chance - each, row, 1) for chance in chances[num_first:] if chance > each]
    return [_Block(value, row, num_first), *rest]


def added_by(added_ms: Float64s, num_drafts: int) -> float:
    """Return what so many drafts add, beyond the end of `added_ms` as the last ones."""
    last = len(added_ms) - 1
    if num_drafts <= last:
        return float(added_ms[num_drafts])
    return float(added_ms[last] + (num_drafts - last) * (added_ms[last] - added_ms[last - 1]))
