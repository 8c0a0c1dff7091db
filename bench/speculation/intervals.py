"""Intervals of ratios, and what they say about a goal.

A ratio of times is that of the sums over all rounds: what happens rarely, such as a probe of the
control, counts as much as it takes. Its interval has the spread of the rounds, with Student's t,
and is wider where neighbouring rounds are alike. Where each side is several engines, it has their
spread as well: engines and rounds are both drawn (two crossed factors). Knows no benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from typing import Literal, NamedTuple

import numpy as np

# Probability that the interval covers what it is of, where there are values enough: six are.
COVERAGE, MIN_VALUES = 0.95, 6
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
    half = ratio * _student(num - 1) * sqrt(_variance_of_rounds(overs, unders))
    coverage = COVERAGE if num >= MIN_VALUES else 0.0
    return Interval(ratio - half, ratio, ratio + half, coverage)


def engines_interval(
    overs: Sequence[Sequence[float]], unders: Sequence[Sequence[float]]
) -> Interval:
    """Return the ratio of the means of two groups of engines. Values are rounds, with what each
    engine took for the same work. With one engine in a group its coverage is 0, and with fewer than
    MIN_VALUES rounds."""
    sides = [np.array(rounds, np.float64) / np.mean(rounds) for rounds in (overs, unders)]
    ratio = float(np.mean(overs) / np.mean(unders))
    num = len(overs)
    if num < 2 or min(side.shape[1] for side in sides) < 2:
        return Interval(ratio, ratio, ratio, 0.0)
    # Relative variances of the ratio, with their degrees of freedom: of the engines (that of Welch)
    # and of the rounds. Both hold what is left of single turns.
    found, of_turns = [], 0.0
    for side in sides:
        num_engines = side.shape[1]
        engines = side.mean(axis=0)
        found.append((float(engines.var(ddof=1)) / num_engines, num_engines - 1))
        left = side - engines - side.mean(axis=1, keepdims=True) + 1.0
        freedom = (num_engines - 1) * (num - 1)
        of_turns += float((left**2).sum()) / freedom / (num * num_engines)
    of_rounds = _variance_of_rounds(*(side.mean(axis=1).tolist() for side in sides))
    found.append((max(of_rounds - of_turns, 0.0), num - 1))
    variance, half = sum(one for one, _ in found), 0.0
    if variance:
        freedom = variance**2 / sum(one**2 / free for one, free in found)  # Satterthwaite
        half = ratio * _student(freedom) * sqrt(variance)
    coverage = COVERAGE if num >= MIN_VALUES else 0.0
    return Interval(ratio - half, ratio, ratio + half, coverage)


def _variance_of_rounds(overs: Sequence[float], unders: Sequence[float]) -> float:
    """Return the variance of the ratio of the sums of paired values, relative to its square."""
    num, ratio = len(overs), sum(overs) / sum(unders)
    apart = [over - ratio * under for over, under in zip(overs, unders, strict=True)]
    variance = sum(one * one for one in apart) / (num - 1)
    alike = sum(one * other for one, other in pairwise(apart)) / (num - 1)
    return (variance + 2.0 * max(alike, 0.0)) / num / (sum(overs) / num) ** 2


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
