"""StepCurve: how long a step takes by the number of positions it computes, as it was measured.

That is no line: on a CPU, a step of eight positions may take as long as one of a single position,
and one of 32 four times as long. So times are kept by buckets of positions, four an octave, and
interpolated. A pace that all buckets share follows what slows a whole machine down for a while.
Knows no clock and no drafts. Always holds: one outlier moves nothing far; what has not been
measured for long counts little; a curve never falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BUCKETS_PER_OCTAVE = 4
# What one further time leaves of the weight of a bucket: against its next time, and against what
# the rest of the curve says.
KEEP, TRUST_KEEP = 0.97, 0.997
MAX_WEIGHT = 32.0
# A time counts as at most so many times what is known, and at least as such a share; but not if
# so many in a row are beyond that on the same side: then all are as slow or fast as the least of
# them, since what disturbs a machine may hold up any of them far longer.
MAX_TIMES, MANY_OUTLIERS = 1.25, 4
# Where a curve learns fast, while a bucket has few times, the next ones may differ so many times.
MAX_FEW_TIMES = 4.0
# Of a difference from a bucket with enough times, the pace follows so much.
FEW, PACE_SHARE = 3.0, 1 / 8


# By number: positions, milliseconds, weight, and how many times were noted then.
Buckets = dict[int, tuple[float, float, float, int]]


class Point(NamedTuple):
    """weight: of so many times."""

    positions: float
    ms: float
    weight: float


class Pace:
    """Shared by curves. times: how much slower steps are than as they are kept. num_noted: times of
    all curves, by which what is known ages. num_outliers: of these, the last ones in a row on the
    same side of what is known."""

    def __init__(self) -> None:
        self.times = 1.0
        self.num_noted = self.num_outliers = 0
        self._least = 1.0  # of these: the time nearest to what is known, in times of it
        self.curves: list[Buckets] = []

    def bounded(self, ms: float, known_ms: float) -> float:
        """Return a time within the bounds of what is known. Where all are beyond them, steps have
        another pace."""
        if known_ms / MAX_TIMES <= ms <= known_ms * MAX_TIMES:
            self.num_outliers = 0
            return ms
        times = ms / known_ms
        if (times > 1.0) != (self._least > 1.0):
            self.num_outliers = 0
        nearer = min(times, self._least) if times > 1.0 else max(times, self._least)
        self._least = nearer if self.num_outliers else times
        self.num_outliers += 1
        if self.num_outliers < MANY_OUTLIERS:
            return min(max(ms, known_ms / MAX_TIMES), known_ms * MAX_TIMES)
        self.num_outliers = 0
        self.times *= self._least
        since = self.num_noted - MANY_OUTLIERS
        for buckets in self.curves:  # what was first noted meanwhile has the new pace already
            for bucket in [key for key, known in buckets.items() if known[3] > since]:
                if buckets[bucket][2] < FEW:
                    del buckets[bucket]
        return known_ms


class StepCurve:
    """Of one kind of steps; `pace` is shared by kinds. learns_fast: how long its steps take is not
    known beforehand, so that the first times may be far from what is expected."""

    def __init__(self, pace: Pace, *, learns_fast: bool = False) -> None:
        self._pace, self._learns_fast = pace, learns_fast
        self._buckets: Buckets = {}
        pace.curves.append(self._buckets)

    def note(self, positions: int, ms: float, expected_ms: float) -> None:
        """Learn from a step of `positions` > 0 that took `ms`. expected_ms: by the rest of what is
        known; it bounds the first time of a bucket from above, as disturbances only slow steps."""
        pace = self._pace
        pace.num_noted += 1
        kept_ms, bucket = ms / pace.times, bucket_of(positions)
        known = self._buckets.get(bucket)
        if known is None:
            kept_ms = min(kept_ms, MAX_TIMES * expected_ms / pace.times)
            self._buckets[bucket] = (float(positions), kept_ms, 1.0, pace.num_noted)
            return
        at, known_ms, weight, noted = known
        age = pace.num_noted - noted
        recent = weight * KEEP**age
        if self._learns_fast and recent < FEW:
            kept_ms = min(max(kept_ms, known_ms / MAX_FEW_TIMES), known_ms * MAX_FEW_TIMES)
        else:
            kept_ms = pace.bounded(kept_ms, known_ms)
        share = 1.0 / (recent + 1.0)
        weight = min(weight * TRUST_KEEP**age + 1.0, MAX_WEIGHT)
        at += share * (positions - at)
        self._buckets[bucket] = (
            *(at, known_ms + share * (kept_ms - known_ms)),
            *(weight, pace.num_noted),
        )
        if recent >= FEW:
            pace.times *= 1.0 + PACE_SHARE * (kept_ms / known_ms - 1.0)

    def weight(self, positions: int) -> float:
        """Return how many times count for steps of about so many positions."""
        known = self._buckets.get(bucket_of(positions))
        return 0.0 if known is None else known[2] * TRUST_KEEP ** (self._pace.num_noted - known[3])

    def ms(self, positions: int) -> float:
        """Return what steps of about so many positions took; 0: none was noted."""
        known = self._buckets.get(bucket_of(positions))
        return 0.0 if known is None else known[1] * self._pace.times

    def points(self) -> Iterator[Point]:
        """Yield what is known, in order of positions."""
        now, times = self._pace.num_noted, self._pace.times
        for _, (positions, ms, weight, noted) in sorted(self._buckets.items()):
            yield Point(positions, ms * times, weight * TRUST_KEEP ** (now - noted))


def bucket_of(positions: float) -> int:
    """Return the bucket of steps of so many positions; each has one of its own up to eight."""
    return round(BUCKETS_PER_OCTAVE * math.log2(positions))


def never_falling(points: Iterable[Point]) -> list[Point]:
    """Return points in order of positions, of which those that fall have their weighted mean."""
    pools: list[tuple[float, float, list[float]]] = []  # ms, weight, and positions
    for positions, ms, weight in points:
        of_pool = [positions]
        while pools and pools[-1][0] >= ms:
            before_ms, before, others = pools.pop()
            ms = (before_ms * before + ms * weight) / (before + weight)
            weight, of_pool = before + weight, others + of_pool
        pools.append((ms, weight, of_pool))
    return [Point(at, ms, weight) for ms, weight, of_pool in pools for at in of_pool]
