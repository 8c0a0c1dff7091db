"""Rounds of a cell: the seconds of each side for the same work, and the ratios of sides.

A round is of one engine where sides share engines, and else of one engine a side; sides that were
left out are missing in later rounds. Single slow turns are clipped. Measures nothing. Always holds:
a ratio is of the rounds that have both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from bench.speculation.intervals import Interval, engines_interval, ratio_interval

# A turn counts as so many times the median one of its side at most: something else took the
# processor. How many there were is part of the result.
MAX_TIMES = 3.0


class Round(NamedTuple):
    """Seconds by side. engine: the number of that which the sides share; None: each has its own."""

    seconds: dict[str, float]
    engine: int | None = None


def clipped(rounds: Sequence[Round]) -> list[Round]:
    """Return rounds without what is beyond MAX_TIMES the median of a side."""
    names = {name: None for one in rounds for name in one.seconds}
    most = {
        name: MAX_TIMES
        * statistics.median(one.seconds[name] for one in rounds if name in one.seconds)
        for name in names
    }
    return [
        one._replace(seconds={name: min(s, most[name]) for name, s in one.seconds.items()})
        for one in rounds
    ]


def num_clipped(rounds: Sequence[Round], others: Sequence[Round]) -> int:
    """Return how many turns differ between rounds and the same ones clipped."""
    return sum(
        one.seconds[name] != other.seconds[name]
        for one, other in zip(rounds, others, strict=True)
        for name in one.seconds
    )


def side_ratio(rounds: Sequence[Round], over: str, under: str) -> Interval:
    """Return the seconds of side `over` by those of `under`, in the rounds that have both."""
    both = [one for one in rounds if over in one.seconds and under in one.seconds]
    if both[0].engine is None:
        overs, unders = ([one.seconds[name] for one in both] for name in (over, under))
        return ratio_interval(overs, unders)
    engines = {one.engine: None for one in both}
    sums = (
        [sum(one.seconds[name] for one in both if one.engine == engine) for engine in engines]
        for name in (over, under)
    )
    return engines_interval(*sums)


def best_side(rounds: Sequence[Round], names: Sequence[str]) -> str:
    """Return the fastest of `names` but the control."""
    return max(
        (name for name in names if name != "auto"),
        key=lambda name: side_ratio(rounds, "off", name).value,
    )
