"""DraftPrices: what drafts add to the time of a step on this machine, learned from its steps.

A step computes a position for each row and one for each draft, and takes a time by their number
(StepCurve), whichever of them are drafts. A step with drafts takes the host longer besides: it
proposes, plans and verifies. So steps without drafts and steps with drafts have a curve each; where
the second is not known, the first stands in, with the host's time learned where both are. Below
what is known, a position costs what the step-cost model predicts, and beyond it at least that.
Steps with drafts are no part of that model's own fit. Knows no clock: times are arguments. Always
holds: prices are not negative and never fall with the number of drafts; what has not been tried for
long drifts back to what the rest of the curve says, so that a few slow steps do not end drafting
for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.speculation.step_curve import Pace, Point, StepCurve, bucket_of, never_falling

Float64s = NDArray[np.float64]
# What the prediction from the point before counts for, against the times of a point.
PRIOR_WEIGHT = 0.25
# Times from which on steps of a number of rows are known, and are known well.
KNOWN_WEIGHT, SURE_WEIGHT = 1.5, 4.0
# Points may be a few steps old where steps took about as long as expected.
NOTES_PER_MAKE, AS_EXPECTED = 8, 0.15
# Of a step, what a difference between steps with drafts and without must exceed to be the host's.
NOISE_SHARE = 0.03
# Of what a step takes longer in which drafts were asked for in vain, so much is learned, and so
# many milliseconds at once: of long steps that is less than their noise.
ASKED_SHARE, MAX_ASKED_MS = 1 / 4, 0.05
# What a step after drafts takes longer counts as so many steps at most; of what all of these steps
# took longer, so much is learned.
MAX_EXCESS_STEPS, AFTER_SHARE = 2.0, 1 / 8
# Steps without drafts of so many times fewer positions say something of the host's time.
FEWER_TIMES = 4.0
# Of the host's time for a step with drafts, what each row with drafts takes besides: counted in
# calls.
ROW_SHARE = 1 / 12
# Of a step with prompts, which are predicted less well, so much of the error is learned. What a
# step in which drafts did not pay leaves of it.
PROMPTS_SHARE, STEP_FADE = 1 / 8, 0.99
# A position costs such a share of what the cost model predicts, whatever was measured.
MIN_SLOPE_SHARE = 0.05
# A time is known between two points at most so many times apart, and near one.
MAX_GAP, NEAR = 2.0, 1.2
# Just beyond the last point, up to so many times its positions, a position counts as so much of
# what is predicted, once in so many steps: otherwise a prediction that is too high would never be
# put to the test. It takes off at most so many steps without drafts.
UNTRIED_TIMES, UNTRIED_SHARE, UNTRIED_EVERY, UNTRIED_STEPS = 1.5, 0.4, 48, 0.5


class DraftedStep(NamedTuple):
    """A step with drafts: rows that have some, computed positions, and what it is predicted to
    take with one position of each row, longer for drafts, and longer for prompts; but not what
    later steps take longer."""

    num_rows: int
    num_positions: int
    plain_ms: float
    added_ms: float
    prompts_ms: float = 0.0


class DraftPrices:
    """once_ms: of the host, for a step with drafts. row_ms: and for each row that has some.
    asked_ms: for a step in which some are asked for in vain; noise may make it negative. after_ms:
    what the steps without drafts that follow one with drafts take longer for it."""

    def __init__(self) -> None:
        self.once_ms = self.row_ms = self.asked_ms = self.after_ms = 0.0
        self._prompts_ms = 0.0  # what steps with prompts and drafts took longer than predicted
        self._pace = Pace()
        self._plain = StepCurve(self._pace)
        self._drafted = StepCurve(self._pace, learns_fast=True)
        self._plain_points: list[Point] = []
        self._points: list[Point] = []  # of steps with drafts, with once_ms and without row_ms
        self._positions: list[float] = []  # of these
        self._ms: list[float] = []
        self._made_at = -NOTES_PER_MAKE  # how many times were noted then
        self._untried_at = 0  # how many times are to be noted before more positions are tried
        # The last answers, and to what.
        self._plain_key, self._plain_ms = (0, 0), 0.0
        self._key: tuple[int, int, float, float, int] | None = None
        self._added_ms: Float64s = np.zeros(2)

    def note_plain(self, num_rows: int, ms: float) -> None:
        """Learn from a step without drafts, of one position a row, that took `ms`."""
        if ms > 0.0:
            expected_ms = _between(self._plain_points, num_rows)
            self._plain.note(num_rows, ms, expected_ms or ms)
            is_new = self._plain.weight(num_rows) < SURE_WEIGHT
            if is_new or abs(ms - expected_ms) > AS_EXPECTED * expected_ms:
                self._made_at = -NOTES_PER_MAKE

    def note_asked(self, num_rows: int, ms: float) -> None:
        """Learn from a step that has no drafts although some were asked for.

        What it took longer is the host's time. A first step with drafts does not separate that from
        the time of its positions.
        """
        plain_ms = _between(self._plain_points, num_rows)
        if plain_ms and ms > 0.0:
            more_ms = ASKED_SHARE * (ms - (1.0 + NOISE_SHARE) * plain_ms - self.asked_ms)
            self.asked_ms += min(max(more_ms, -MAX_ASKED_MS), MAX_ASKED_MS)

    def excess_ms(self, num_rows: int, ms: float) -> float:
        """Return what a step without drafts took longer than such steps do; 0: that is unknown."""
        plain_ms = _between(self._plain_points, num_rows)
        return min(ms - plain_ms, MAX_EXCESS_STEPS * plain_ms) if plain_ms else 0.0

    def note_after(self, ms: float) -> None:
        """Learn what steps took longer that followed one with drafts: 0 where none did."""
        self.after_ms = max(self.after_ms + AFTER_SHARE * (ms - self.after_ms), 0.0)

    def note(self, step: DraftedStep, ms: float) -> None:
        """Learn from a step that took `ms`; ignore times of 0."""
        if ms <= 0.0:
            return
        if step.prompts_ms:
            error_ms = ms - step.plain_ms - step.added_ms - step.prompts_ms
            error_ms = min(max(error_ms, -step.plain_ms), step.plain_ms)
            self._prompts_ms = max(self._prompts_ms + PROMPTS_SHARE * error_ms, 0.0)
            return
        expected_ms = step.plain_ms + step.added_ms
        rows_ms = step.num_rows * self.row_ms
        self._drafted.note(
            step.num_positions,
            max(ms - rows_ms, 0.5 * ms),
            max(expected_ms - rows_ms, 0.5 * expected_ms),
        )
        # By buckets: a point is a mean, and may be below the steps that it is of.
        if self._positions and bucket_of(step.num_positions) > bucket_of(self._positions[-1]):
            self._untried_at = self._pace.num_noted + UNTRIED_EVERY
        is_new = self._drafted.weight(step.num_positions) < SURE_WEIGHT
        if is_new or abs(ms - expected_ms) > AS_EXPECTED * expected_ms:
            self._made_at = -NOTES_PER_MAKE

    def fade(self) -> None:
        """Note that no drafts were worth their price."""
        self._pace.num_noted += 1
        self._prompts_ms *= STEP_FADE
        self.after_ms *= STEP_FADE

    def known_plain_ms(self, num_rows: int) -> float:
        """Return what steps of about so many rows take without drafts; 0: too few were measured."""
        return self._plain.ms(num_rows) if self._plain.weight(num_rows) >= KNOWN_WEIGHT else 0.0

    def plain_ms(self, num_rows: int, slope_ms: float) -> float:
        """Return what a step of `num_rows` rows without drafts takes; 0: none like it is known.

        While few were timed, at most what steps with drafts say: one slow step must not make drafts
        look cheap.
        """
        self._make(slope_ms)
        if self._plain_key != (num_rows, self._made_at):
            self._plain_key = num_rows, self._made_at
            self._plain_ms = self._measured_ms(num_rows)
        return self._plain_ms

    def _measured_ms(self, num_rows: int) -> float:
        """Return what `plain_ms` does."""
        found = _between(self._plain_points, num_rows)
        if self._plain.weight(num_rows) < SURE_WEIGHT:
            bound = _between(self._points, num_rows) - self.once_ms
            return min(found, bound) if bound > 0.0 else found
        return found

    def added_ms(
        self, num_positions: int, num_drafts: int, plain_ms: float, slope_ms: float
    ) -> Float64s:
        """Return what 0 to `num_drafts` drafts in all add to a step of so many positions and to
        those that follow, but for what each row with drafts takes.

        plain_ms: what it takes without drafts, as measured; 0: it computes prompts. slope_ms: of a
        further position, by the cost model.
        """
        self._make(slope_ms)
        key = (num_positions, num_drafts, plain_ms, self.after_ms, self._made_at)
        if not plain_ms or key != self._key:
            self._key, self._added_ms = key, self._computed(*key[:3], slope_ms)
        return self._added_ms

    def _computed(
        self, num_positions: int, num_drafts: int, plain_ms: float, slope_ms: float
    ) -> Float64s:
        """Return what `added_ms` does."""
        numbers = np.arange(num_positions, num_positions + num_drafts + 1, dtype=np.float64)
        offset_ms = self.once_ms + self._prompts_ms
        if self._points:
            added: Float64s = np.interp(numbers, self._positions, self._ms)
            first, last = self._positions[0], self._positions[-1]
            if numbers[0] < first:
                added -= slope_ms * np.maximum(first - numbers, 0.0)
            if numbers[-1] > last:
                beyond_ms = self._last_slope(slope_ms) * np.maximum(numbers - last, 0.0)
                added += beyond_ms
                if self._pace.num_noted >= self._untried_at:
                    near_ms = self._last_slope(slope_ms) * (UNTRIED_TIMES - 1.0) * last
                    less_ms = (1.0 - UNTRIED_SHARE) * np.minimum(beyond_ms, near_ms)
                    added -= np.minimum(less_ms, UNTRIED_STEPS * (plain_ms or self._ms[0]))
            added -= plain_ms or added[0] - offset_ms
            numbers -= num_positions  # of drafts now
        else:
            numbers -= num_positions
            added = slope_ms * numbers + offset_ms
        np.maximum(added, MIN_SLOPE_SHARE * slope_ms * numbers, out=added)
        added += self.after_ms
        added[0] = 0.0
        return added

    def _last_slope(self, slope_ms: float) -> float:
        """Return what a position beyond the last point costs: what those before it did, and at
        least `slope_ms`."""
        last = self._points[-1]
        for before in reversed(self._points):
            if before.positions <= last.positions / MAX_GAP:
                return max(slope_ms, (last.ms - before.ms) / (last.positions - before.positions))
        return slope_ms

    def _make(self, slope_ms: float) -> None:
        """Make the points anew, if much was learned since."""
        num_noted = self._pace.num_noted
        if num_noted - self._made_at < NOTES_PER_MAKE:
            return
        self._made_at = num_noted
        self._plain_points = never_falling(self._plain.points())
        drafted = list(self._drafted.points())
        self._learn_host(drafted, slope_ms)
        stand_ins = [
            Point(at, ms + self.once_ms, weight)
            for at, ms, weight in self._plain_points
            if not any(at / NEAR < other.positions < at * NEAR for other in drafted)
        ]
        self._points = never_falling(_smoothed(sorted(drafted + stand_ins), slope_ms))
        self._positions = [point.positions for point in self._points]
        self._ms = [point.ms for point in self._points]

    def _learn_host(self, drafted: Sequence[Point], slope_ms: float) -> None:
        """Learn the host's time from steps with drafts: where such without are known, or else, with
        little weight, where some of fewer positions are. slope_ms: of a position."""
        sum_ms, num = PRIOR_WEIGHT * max(self.asked_ms, 0.0), PRIOR_WEIGHT
        for place, (at, ms, weight) in enumerate(drafted, start=1):
            plain_ms = _between(self._plain_points, at)
            fewer = [one for one in self._plain_points if one.positions < at]
            if not plain_ms and fewer and at <= FEWER_TIMES * fewer[-1].positions:
                each_ms = slope_ms
                if place < len(drafted):  # further positions never cost less
                    after = drafted[place]
                    each_ms = max(each_ms, (after.ms - ms) / (after.positions - at))
                plain_ms = fewer[-1].ms + each_ms * (at - fewer[-1].positions)
                weight = PRIOR_WEIGHT * min(weight, 1.0)
            if plain_ms:
                sum_ms += weight * (ms - (1.0 + NOISE_SHARE) * plain_ms)
                num += weight
        self.once_ms = max(sum_ms / num, 0.0)
        self.row_ms = ROW_SHARE * self.once_ms


def _smoothed(points: Sequence[Point], slope_ms: float) -> list[Point]:
    """Return points with few times held near the line between those beside them, and the last one
    near what the point before predicts. slope_ms: of a position.

    What slows a single step only makes it longer: the time of a few is believed less where it is
    above that line. Then it is tried again, and is known.
    """
    found = list(points[:1])
    for place in range(1, len(points)):
        at, ms, weight = points[place]
        before, each_ms, prior = found[-1], slope_ms, PRIOR_WEIGHT
        known = (one for one in points[place + 1 :] if one.weight >= KNOWN_WEIGHT)
        if (after := next(known, None)) is not None:
            each_ms = max(after.ms - before.ms, 0.0) / (after.positions - before.positions)
            prior = min(before.weight, after.weight, 1.0)
        expected_ms = before.ms + each_ms * (at - before.positions)
        if ms > expected_ms:
            prior = max(prior, SURE_WEIGHT - weight)
        ms = (weight * ms + prior * expected_ms) / (weight + prior)
        found.append(Point(at, ms, weight))
    return found


def _between(points: Sequence[Point], positions: float) -> float:
    """Return the milliseconds of so many positions, by points near enough; 0: unknown."""
    low = high = None
    for point in points:
        if point.positions >= positions:
            high = point
            break
        low = point
    if low is not None and high is not None and high.positions <= MAX_GAP * low.positions:
        part = (positions - low.positions) / (high.positions - low.positions)
        return low.ms + part * (high.ms - low.ms)
    if high is not None and high.positions <= NEAR * positions:
        return high.ms
    return low.ms if low is not None and positions <= NEAR * low.positions else 0.0
