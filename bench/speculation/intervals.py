"""Intervals of ratios, and what they say about a goal.

A ratio of times is that of the sums over all rounds: what happens rarely, such as a probe of the
control, counts as much as it takes. Of one engine its interval has the spread of the rounds, with
Student's t, and is wider where neighbouring rounds are alike. Of several engines, each with all
sides, it has the spread of their ratios: that has what their rounds differ by in it, and what is
the engine's own, such as the place of its memory. Knows no benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal, NamedTuple

# Probability that the interval covers what it is of, where there are values enough: six are.
COVERAGE, MIN_VALUES = 0.95, 6
# Of engines; each is the sum of many steps.
MIN_ENGINES = 4
# Of an interval that decides anything.
MIN_COVERAGE = 0.75
Z = statistics.NormalDist().inv_cdf(0.5 + COVERAGE / 2.0)
Verdict = Literal["met", "missed", "not decided"]
VERDICTS: tuple[Verdict, ...] = ("met", "missed", "not decided")


class Interval(NamedTuple):
    """coverage: the probability that low .. high covers the value of all that could be drawn."""

    low: float
    value: float
    high: float
    coverage: float

    def widened(self, times: float) -> Interval:
        """Return an interval that reaches so many times as far."""
        low = self.value - times * (self.value - self.low)
        high = self.value + times * (self.high - self.value)
        return self._replace(low=low, high=high)

    @property
    def half_width(self) -> float:
        """Return half of the width, relative to the value."""
        return (self.high - self.low) / 2.0 / self.value

    def shown(self) -> dict[str, float]:
        """Return what a file of results has of it."""
        return {
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "coverage": round(self.coverage, 3),
        }


def ratio_interval(overs: Sequence[float], unders: Sequence[float]) -> Interval:
    """Return the ratio of the sums of paired values. With fewer than MIN_VALUES pairs its coverage
    is 0: they say little of their spread."""
    num, ratio = len(overs), sum(overs) / sum(unders)
    if num < 2:
        return Interval(ratio, ratio, ratio, 0.0)
    apart = [over - ratio * under for over, under in zip(overs, unders, strict=True)]
    alike = sum(one * other for one, other in pairwise(apart)) / (num - 1)
    half = _half(overs, apart, 2.0 * max(alike, 0.0))
    coverage = COVERAGE if num >= MIN_VALUES else 0.0
    return Interval(ratio - half * ratio, ratio, ratio + half * ratio, coverage)


def engines_interval(overs: Sequence[float], unders: Sequence[float]) -> Interval:
    """Return the ratio of the sums of what engines took, each for both sides: as many independent
    pairs as there are engines. With fewer than MIN_ENGINES its coverage is 0."""
    num, ratio = len(overs), sum(overs) / sum(unders)
    if num < 2:
        return Interval(ratio, ratio, ratio, 0.0)
    apart = [over - ratio * under for over, under in zip(overs, unders, strict=True)]
    half = _half(overs, apart)
    coverage = COVERAGE if num >= MIN_ENGINES else 0.0
    return Interval(ratio - half * ratio, ratio, ratio + half * ratio, coverage)


def _half(overs: Sequence[float], apart: Sequence[float], alike: float = 0.0) -> float:
    """Return half of the width of the interval of a ratio of sums, relative to it. apart: of each
    value from the ratio. alike: added to their variance."""
    num = len(overs)
    variance = sum(one * one for one in apart) / (num - 1) + alike
    return _student(num - 1) * sqrt(variance / num) / (sum(overs) / num)


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of two values or more, relative to their mean."""
    return statistics.stdev(values) / statistics.fmean(values)


def verdict(goal: float, interval: Mapping[str, float]) -> Verdict:
    """Return whether a goal is met: not decided if it lies within the interval, or if that is of
    too few values to say anything."""
    if interval["coverage"] >= MIN_COVERAGE:
        if interval["low"] >= goal:
            return "met"
        if interval["high"] < goal:
            return "missed"
    return "not decided"


def _student(freedom: float) -> float:
    """Return Student's quantile of COVERAGE on both sides (Cornish and Fisher's expansion; within
    1 % from 3 degrees of freedom on, and 3 % for 2)."""
    first = (Z**3 + Z) / 4.0
    second = (5.0 * Z**5 + 16.0 * Z**3 + 3.0 * Z) / 96.0
    third = (3.0 * Z**7 + 19.0 * Z**5 + 17.0 * Z**3 - 15.0 * Z) / 384.0
    return Z + first / freedom + second / freedom**2 + third / freedom**3
