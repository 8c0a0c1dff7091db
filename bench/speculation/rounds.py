"""Rounds of a cell: the seconds of each engine, and the ratios of sides.

A round holds what each engine of a side took for the same work; sides that were left out are
missing in later rounds. Single slow turns are clipped. Measures nothing. Always holds: a ratio is
of the rounds that have both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.speculation.intervals import Interval, engines_interval, ratio_interval

Round = dict[str, list[float]]  # seconds by side, of each of its engines
# A turn counts as so many times the median one of its engine at most: something else took the
# processor. How many there were is part of the result.
MAX_TIMES = 3.0


def clipped(rounds: Sequence[Round]) -> list[Round]:
    """Return rounds without what is beyond MAX_TIMES the median of an engine."""
    found: list[Round] = [{} for _ in rounds]
    for name in {name: None for one in rounds for name in one}:
        there = [place for place, one in enumerate(rounds) if name in one]
        by_engine = list(zip(*(rounds[place][name] for place in there), strict=True))
        most = [MAX_TIMES * statistics.median(one) for one in by_engine]
        for place in there:
            found[place][name] = [
                min(one, limit) for one, limit in zip(rounds[place][name], most, strict=True)
            ]
    return found


def num_clipped(rounds: Sequence[Round], others: Sequence[Round]) -> int:
    """Return how many turns differ between rounds and the same ones clipped."""
    return sum(
        one != other
        for taken, found in zip(rounds, others, strict=True)
        for name in taken
        for one, other in zip(taken[name], found[name], strict=True)
    )


def side_ratio(rounds: Sequence[Round], over: str, under: str) -> Interval:
    """Return the seconds of side `over` by those of `under`, in the rounds that have both."""
    overs, unders = zip(
        *((one[over], one[under]) for one in rounds if over in one and under in one), strict=True
    )
    if len(overs[0]) == len(unders[0]) == 1:
        return ratio_interval([one for [one] in overs], [one for [one] in unders])
    return engines_interval(overs, unders)


def best_side(rounds: Sequence[Round], names: Sequence[str]) -> str:
    """Return the fastest of `names` but the control."""
    return max(
        (name for name in names if name != "auto"),
        key=lambda name: side_ratio(rounds, "off", name).value,
    )


def off_of_off(rounds: Sequence[Round]) -> list[float]:
    """Return the speed of each engine without drafts, relative to their mean; of one: nothing."""
    sums = [sum(one) for one in zip(*(one["off"] for one in rounds), strict=True)]
    return [round(statistics.fmean(sums) / one, 4) for one in sums] if len(sums) > 1 else []
