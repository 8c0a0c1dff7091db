"""Measure one cell: sides without drafts, with the control, and with fixed k, in turns.

In a small model all sides share some engines: equal ones differ by as much as the goals leave, as
their memory lies elsewhere. The interval of a ratio is that of the engines. In large models a side
is one engine, and the interval that of rounds. Rounds go on until both goals are clearly decided or
the intervals are narrow, or until the cell's time is over; fixed numbers of drafts that are clearly
slower than the best one are left out. Always holds: before they are measured the control has taken
a number of steps, and each engine of a small model has answered all requests; a side with other
tokens than without drafts ends the measurement; which rounds count does not depend on their ratios,
only how many do; a cell has FIRST_ROUNDS if these take no more than MAX_TIME_TIMES its time; each
side with an engine of its own has taken one step before it is measured, and all steps of its
warm-up if there is time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.speculation.cells import FIXED_WARM_UP_STEPS, GOAL_CONTROL, GOAL_LEAST, Cell
from bench.speculation.intervals import Interval, verdict
from bench.speculation.race import slower_sides
from bench.speculation.rounds import Round, best_side, clipped, num_clipped, side_ratio
from bench.speculation.sides import Side, Stream, Task
from bench.speculation.turns import OwnEngines, Rounds, SharedEngines, Turns

# Rounds that a cell has before its time ends it, until it may end before its time, and at most.
FIRST_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 6, 12, 2000
# Rounds of each shared engine until a cell may end before its time.
MIN_VISITS = 2
# How long the first rounds may go on beyond the time of a cell, as a multiple of it.
MAX_TIME_TIMES = 2.5
# Whether rounds end is asked each time when there are so many times as many as before.
CHECK_TIMES = 1.125
# Half of the width of both intervals at which rounds end; and at most where the goals are decided.
NARROW, DECIDED = 0.005, 0.03
# Then no goal lies in an interval that reaches so many times as far. It is asked after 12, 14, ...
# rounds: by the interval itself 14 % of the cells on a goal would have a verdict at some time (5 %
# so), and 69 % of their intervals would cover it (90 % so).
EARLY_TIMES = 1.4


class Measurement:
    """The rounds of a cell, which `extend` adds to. names: of the sides; "off" and "auto" are two.
    ready: returns a side that may be measured, on each engine."""

    def __init__(
        self,
        cell: Cell,
        names: Sequence[str],
        ready: Callable[[str], Sequence[Side]],
        tasks: Sequence[Task],
    ) -> None:
        self.rounds: list[Round] = []
        self._cell, self._ready, self._tasks = cell, ready, tasks
        self._all, self._names = list(names), list(names)
        self._sides: dict[str, Sequence[Side]] = {}
        self._rounds = Rounds()
        self._tokens = self._warm_up_steps = 0
        self._drafted: dict[str, list[int]] = {name: [0, 0, 0] for name in names}

    @property
    def has_ended(self) -> bool:
        """Return whether more rounds would say little, or there may be no more."""
        num_engines = len(self._sides["off"])
        if len(self.rounds) < max(MIN_ROUNDS, MIN_VISITS * num_engines):
            return False
        if len(self.rounds) >= MAX_ROUNDS:
            return True
        speed, share = self.speed, self.share
        if max(speed.half_width, share.half_width) <= NARROW:
            return True
        goals = ((GOAL_LEAST, speed), (self._cell.goal, speed), (GOAL_CONTROL, share))
        return all(
            found.half_width <= DECIDED
            and verdict(goal, found.widened(EARLY_TIMES).shown()) != "not decided"
            for goal, found in goals
        )

    @property
    def best_fixed(self) -> str:
        """Return the side with a fixed number of drafts, or none, that is fastest, of those that
        were not left out."""
        return best_side(clipped(self.rounds), self._names)

    @property
    def speed(self) -> Interval:
        """Return the speed of the control over that without drafts."""
        return side_ratio(clipped(self.rounds), "off", "auto")

    @property
    def share(self) -> Interval:
        """Return the speed of the control over that of the best fixed number. Of equal ones the
        luckiest is the best: this is rather too low than too high."""
        return side_ratio(clipped(self.rounds), self.best_fixed, "auto")

    @property
    def width(self) -> float:
        """Return half of the width of the wider interval."""
        return max(self.speed.half_width, self.share.half_width)

    def prepare(self) -> None:
        """Have all sides ready."""
        self._sides = {name: self._ready(name) for name in self._names}

    def extend(self, has_time: Callable[[], bool], has_more: Callable[[], bool]) -> None:
        """Take rounds after the sides have been warmed up, while there is time; FIRST_ROUNDS
        while there is more of it, and one at least."""
        self._warm_up(has_more)
        turns = self._turns()
        try:
            self._take_rounds(turns, has_time, has_more)
        finally:
            turns.end()

    def _warm_up(self, has_more: Callable[[], bool]) -> None:
        """Let each side take what steps it needs until its speed is that of later ones."""
        cell, is_first = self._cell, not self._warm_up_steps
        if is_first and not cell.shares_engines:
            for name in self._names:
                for side in self._sides[name] if name != "auto" else ():
                    self._take_steps(side, FIXED_WARM_UP_STEPS, has_more)
        if is_first or not cell.shares_engines:  # of its own engine other cells use the control
            for side in self._sides["auto"]:
                self._warm_up_steps += self._take_steps(side, cell.warm_up_steps, has_more)

    def _take_steps(self, side: Side, num_steps: int, has_more: Callable[[], bool]) -> int:
        """Let a side take so many steps while there is time, one at least; return how many."""
        warm = Stream(side, self._tasks, self._cell.batch)
        while warm.steps < num_steps and (has_more() or not warm.steps):
            warm.for_steps(1)
        warm.end()
        return warm.steps

    def _turns(self) -> Turns:
        sides = {name: self._sides[name] for name in self._names}
        if self._cell.shares_engines:
            return SharedEngines(sides, self._tasks, self._cell, self._drafted)
        own = {name: side for name, [side] in sides.items()}
        return OwnEngines(own, self._tasks, self._cell, self._drafted)

    def _take_rounds(
        self, turns: Turns, has_time: Callable[[], bool], has_more: Callable[[], bool]
    ) -> None:
        check = 0.0
        for found in self._rounds.taken(turns, self._names):
            self._tokens += self._cell.round_tokens
            self.rounds.append(found)
            num = len(self.rounds)
            if num >= check or num == MIN_ROUNDS:
                check = min(num * CHECK_TIMES, MAX_ROUNDS)
                self._leave_out()
                if self.has_ended:
                    return
            if not (has_time() or (num < FIRST_ROUNDS and has_more())):
                return

    def _leave_out(self) -> None:
        """Take the sides out of later rounds that are clearly not the best one."""
        fixed = [name for name in self._names if name != "auto"]
        for name in slower_sides(self._cell, self.rounds, fixed):
            self._names.remove(name)

    def summary(self) -> dict[str, Any]:
        """Return ratios of speed with the intervals of those of the control, and what they are of:
        tokens of each side, rounds, and engines: how many all sides share, or how many each has."""
        rounds = clipped(self.rounds)
        rows, drafted, accepted = self._drafted["auto"]
        fixed = [counts for name, counts in self._drafted.items() if name.startswith("k")]
        tried, right = (sum(one[place] for one in fixed) for place in (1, 2))
        num_engines: dict[str, Any] = {"engines": dict.fromkeys(self.rounds[0].seconds, 1)}
        if self._cell.shares_engines:
            num_engines = {"shared_engines": len({one.engine for one in self.rounds})}
        return {
            "rounds": len(self.rounds),
            "tokens": self._tokens,
            **num_engines,
            "warm_up_steps": self._warm_up_steps,
            "disturbed": self._rounds.num_disturbed,
            "clipped": num_clipped(self.rounds, rounds),
            "speedups": {
                name: round(side_ratio(rounds, "off", name).value, 3)
                for name in self._all
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
