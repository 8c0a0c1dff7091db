"""Measure one cell: engines without drafts, with the control, and with fixed k, in short turns.

In a round each side generates the same number of tokens of the same answers, in an order that
rotates; the times of a round are pairs, so that neither a drift of the machine nor the text counts.
The ratio of two sides is that of their sums. Rounds go on until both goals are decided or the
intervals are narrow, or until the cell's time is over; fixed numbers of drafts that are clearly
slower than the best one are left out of later rounds. Always holds: before they are measured the
control has taken a number of steps, and each engine of a small model has answered all requests; a
side with other tokens than without drafts ends the measurement; which rounds count does not depend
on their ratios.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.speculation.cells import GOAL_CONTROL, GOAL_LEAST, Cell
from bench.speculation.intervals import Interval, ratio_interval, verdict
from bench.speculation.sides import Side, Stream, Task, answers_of
from quire.bench.cpu_use import CpuWatch

Round = dict[str, float]  # seconds by side
# Rounds until a cell may be decided, and at most.
MIN_ROUNDS, MAX_ROUNDS = 12, 400
# Half of the width of both intervals at which rounds end; and at most where a goal is decided.
NARROW, DECIDED = 0.005, 0.03
# A fixed k is left out after so many rounds if its share of the best one's speed is less; later,
# if its interval is below what the control must reach.
POOR_SHARES = {1: 0.6, 2: 0.8}
SOME_ROUNDS, LOW_SHARE = 4, GOAL_CONTROL
# A turn counts as so many times the median one of its side at most: something else took the
# processor. How many there were is part of the result.
MAX_TIMES = 3.0
# A round does not count in which other programs, or machines, took so many seconds of a processor
# and such a share of the time besides; but in so many times as many rounds as count at most.
MAX_DISTURBED_TIMES = 3
FOREIGN_S, FOREIGN_SHARE = 0.03, 0.05
# So many rounds do not count at first: prompts are computed, and the first steps are slow.
RUN_IN_ROUNDS = 1


class Measurement:
    """The rounds of a cell, which `extend` adds to. sides: by name; "off" and "auto" are two."""

    def __init__(self, cell: Cell, sides: Mapping[str, Side], tasks: Sequence[Task]) -> None:
        self.rounds: list[Round] = []
        self._cell, self._sides, self._tasks = cell, sides, tasks
        self._names = list(sides)
        self._tokens = self._warm_up_steps = self._num_disturbed = 0
        self._drafted: dict[str, list[int]] = {name: [0, 0, 0] for name in sides}

    @property
    def has_ended(self) -> bool:
        """Return whether more rounds would say little, or there may be no more."""
        if len(self.rounds) < MIN_ROUNDS:
            return False
        if len(self.rounds) >= MAX_ROUNDS:
            return True
        speed, share = self.speed, self.share
        if max(speed.half_width, share.half_width) <= NARROW:
            return True
        goals = ((GOAL_LEAST, speed), (self._cell.goal, speed), (GOAL_CONTROL, share))
        return all(
            verdict(goal, found.shown()) != "not decided" and found.half_width <= DECIDED
            for goal, found in goals
        )

    @property
    def best_fixed(self) -> str:
        """Return the side with a fixed number of drafts, or none, that is fastest, of those that
        were not left out."""
        rounds = _clipped(self.rounds)
        names = [name for name in self._names if name != "auto"]
        return max(names, key=lambda name: _ratio(rounds, "off", name).value)

    @property
    def speed(self) -> Interval:
        """Return the speed of the control over that without drafts."""
        return _ratio(_clipped(self.rounds), "off", "auto")

    @property
    def share(self) -> Interval:
        """Return the speed of the control over that of the best fixed number."""
        return _ratio(_clipped(self.rounds), self.best_fixed, "auto")

    @property
    def width(self) -> float:
        """Return half of the width of the wider interval."""
        return max(self.speed.half_width, self.share.half_width)

    def extend(self, has_time: Callable[[], bool]) -> None:
        """Take rounds, one at least, after the control has been warmed up."""
        if self._cell.is_small and not self.rounds:
            # A side that has these answers in its prefix cache takes shorter steps: by 8 % once.
            for side in self._sides.values():
                answers_of(side, self._tasks, self._cell.max_num_seqs)
        warm = Stream(self._sides["auto"], self._tasks, self._cell.batch)
        while warm.steps < self._cell.warm_up_steps and (has_time() or not warm.steps):
            warm.for_steps(1)
        self._warm_up_steps += warm.steps
        warm.end()
        streams = {
            name: Stream(self._sides[name], self._tasks, self._cell.batch) for name in self._names
        }
        try:
            self._take_rounds(streams, has_time)
        finally:
            for name, stream in streams.items():
                for place, more in enumerate(stream.drafted()):
                    self._drafted[name][place] += more
                stream.end()

    def _take_rounds(self, streams: Mapping[str, Stream], has_time: Callable[[], bool]) -> None:
        target = RUN_IN_ROUNDS * self._cell.round_tokens
        reached = {name: stream.until(target) for name, stream in streams.items()}
        while not self.rounds or (has_time() and not self.has_ended):
            target += self._cell.round_tokens
            first = len(self.rounds) % len(self._names)
            seconds: Round = {}
            watch, began_s = CpuWatch([os.getpid()]), time.monotonic()
            for name in self._names[first:] + self._names[:first]:
                before_s, reached[name] = reached[name], streams[name].until(target)
                seconds[name] = round(reached[name] - before_s, 7)
            most = MAX_DISTURBED_TIMES * (len(self.rounds) + 1)
            if self._num_disturbed < most and _is_disturbed(watch, began_s):
                self._num_disturbed += 1
                continue
            self._tokens += self._cell.round_tokens
            self.rounds.append(seconds)
            self._leave_out()

    def _leave_out(self) -> None:
        """Take the sides out of later rounds that are clearly not the best."""
        rounds, best = _clipped(self.rounds), self.best_fixed
        poor, left = POOR_SHARES[min(len(rounds), max(POOR_SHARES))], []
        for name in self._names:
            share = _ratio(rounds, best, name)
            is_poor = share.value < poor
            is_low = share.high < LOW_SHARE and len(self.rounds) >= SOME_ROUNDS
            if name in ("off", "auto", best) or not (is_poor or is_low):
                left.append(name)
        self._names = left

    def summary(self) -> dict[str, Any]:
        """Return ratios of speed with the intervals of those of the control, and what they are of:
        tokens of each side, and how many rounds."""
        rounds = _clipped(self.rounds)
        rows, drafted, accepted = self._drafted["auto"]
        fixed = [counts for name, counts in self._drafted.items() if name.startswith("k")]
        tried, right = (sum(one[place] for one in fixed) for place in (1, 2))
        return {
            "rounds": len(self.rounds),
            "tokens": self._tokens,
            "warm_up_steps": self._warm_up_steps,
            "disturbed": self._num_disturbed,
            "clipped": sum(
                one[name] != other[name]
                for one, other in zip(rounds, self.rounds, strict=True)
                for name in one
            ),
            "speedups": {
                name: round(_ratio(rounds, "off", name).value, 3)
                for name in self._sides
                if name != "off"
            },
            "speedup_interval": self.speed.shown(),
            "best_fixed": self.best_fixed,
            "control_of_best": round(self.share.value, 3),
            "control_interval": self.share.shown(),
            "half_width": round(self.width, 4),
            "drafted": drafted,
            "acceptance": round(accepted / drafted, 4) if drafted else None,
            "acceptance_of_fixed": round(right / tried, 4) if tried else None,
            "tokens_per_row_with_drafts": round(1 + accepted / rows, 3) if rows else None,
        }


def _is_disturbed(watch: CpuWatch, began_s: float) -> bool:
    """Return whether others took the processor since the watch began."""
    use, seconds = watch.use(), time.monotonic() - began_s
    foreign_s = ((use.foreign_cores or 0.0) + (use.stolen_cores or 0.0)) * seconds
    return foreign_s > FOREIGN_S + FOREIGN_SHARE * seconds


def _ratio(rounds: Sequence[Round], over: str, under: str) -> Interval:
    """Return the seconds of side `over` by those of `under`, in the rounds that have both."""
    both = [(one[over], one[under]) for one in rounds if over in one and under in one]
    return ratio_interval([one for one, _ in both], [one for _, one in both])


def _clipped(rounds: Sequence[Round]) -> list[Round]:
    """Return rounds without what is beyond MAX_TIMES the median of a side."""
    names = {name for one in rounds for name in one}
    most = {
        name: MAX_TIMES * statistics.median(one[name] for one in rounds if name in one)
        for name in names
    }
    return [{name: min(ms, most[name]) for name, ms in one.items()} for one in rounds]
