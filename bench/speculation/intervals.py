"""Intervals of medians, and what they say about a goal.

The interval lies between two of the ordered values, so it needs no assumption on how they are
distributed: each value is below the median with probability 1/2. The probability is that of a
number of values that was fixed before; values that end once the interval is narrow cover a little
less (92 to 97 % in a simulation, with the limits of measure.py). Knows no benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import comb
from typing import Literal, NamedTuple

# Probability that the interval covers the median, where there are values enough: six are.
COVERAGE = 0.95
# Of an interval that decides anything: three values have it.
MIN_COVERAGE = 0.75
Verdict = Literal["met", "met within the interval", "missed within the interval", "missed"]
VERDICTS: tuple[Verdict, ...] = (
    *("met", "met within the interval"),
    *("missed within the interval", "missed"),
)


class Interval(NamedTuple):
    """coverage: the probability that low .. high covers the median of all that could be drawn."""

    low: float
    median: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        """Return half of the width, relative to the median."""
        return (self.high - self.low) / 2.0 / self.median


def interval_of(values: Sequence[float]) -> Interval:
    """Return the narrowest interval of ordered values with COVERAGE, or all of them if few."""
    ordered, num = sorted(values), len(values)
    left_out = 0  # on each side
    while num > 2 * (left_out + 1) and _coverage(num, left_out + 1) >= COVERAGE:
        left_out += 1
    return Interval(
        low=ordered[left_out],
        median=statistics.median(ordered),
        high=ordered[num - 1 - left_out],
        coverage=_coverage(num, left_out),
    )


def verdict(goal: float, median: float, interval: Mapping[str, float]) -> Verdict:
    """Return whether a goal is met, and whether the interval leaves it open: if the goal lies
    within it, or if it is of too few values to say anything."""
    if interval["coverage"] >= MIN_COVERAGE:
        if interval["low"] >= goal:
            return "met"
        if interval["high"] < goal:
            return "missed"
    return "met within the interval" if median >= goal else "missed within the interval"


def _coverage(num: int, left_out: int) -> float:
    """Return the probability that more than `left_out` of `num` values lie on each side."""
    return 1.0 - 2.0 * sum(comb(num, below) for below in range(left_out + 1)) / 2.0**num
