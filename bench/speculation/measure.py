"""Measure one cell: engines without drafts, with the control, and with fixed k, in short turns.

Equal engines differ, as their memory lies elsewhere, and in a small model by as much as the goals
leave: there a side is several engines, the ratio of two sides is that of the means of their
engines' sums, and its interval is that of engines and of rounds. In large models a side is one
engine, and the interval that of rounds. Rounds go on until both goals are clearly decided or the
intervals are narrow, or until the cell's time is over; fixed numbers of drafts that are clearly
slower than the best one are left out, in a small model after a race of one engine each. Always
holds: before they are measured the control has taken a number of steps, and each engine of a small
model has answered all requests; an engine with other tokens than without drafts ends the
measurement; which rounds count does not depend on their ratios, only how many do; a cell has
FIRST_ROUNDS if these take no more than MAX_TIME_TIMES its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.speculation.cells import GOAL_CONTROL, GOAL_LEAST, NUM_FIXED_ENGINES, Cell
from bench.speculation.intervals import Interval, verdict
from bench.speculation.race import SOME_ROUNDS, slower_sides
from bench.speculation.rounds import (
    Round,
    best_side,
    clipped,
    num_clipped,
    off_of_off,
    side_ratio,
)
from bench.speculation.sides import Side, Stream, Task
from bench.speculation.turns import Turn, Turns

Ready = Callable[[str, int], Sequence[Side]]
# Rounds that a cell has before its time ends it, until it may end before its time, and at most.
FIRST_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 6, 12, 2000
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
# A cell of a small model does not end before its time until each request has so many tokens, in
# answers: the first ones of a stream are no fair sample.
MIN_ANSWERS = 2


class Measurement:
    """The rounds of a cell, which `extend` adds to. names: of the sides; "off" and "auto" are two.
    ready: returns so many engines of a side that may be measured. num_engines: of a side."""

    def __init__(
        self,
        cell: Cell,
        names: Sequence[str],
        ready: Ready,
        tasks: Sequence[Task],
        num_engines: int = 1,
    ) -> None:
        self.rounds: list[Round] = []
        self._cell, self._ready, self._tasks = cell, ready, tasks
        self._all, self._names, self._num_engines = list(names), list(names), num_engines
        self._race: list[Round] = []  # of one engine each, before a side has several
        self._turns = Turns(cell)
        self._tokens = self._warm_up_steps = 0
        self._drafted: dict[str, list[int]] = {name: [0, 0, 0] for name in names}

    @property
    def has_ended(self) -> bool:
        """Return whether more rounds would say little, or there may be no more."""
        if len(self.rounds) < min_rounds(self._cell):
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
        """Have all engines ready; of fixed numbers those that may be the best, if a side is several
        engines."""
        fixed = [name for name in self._names if name != "auto"]
        if self._num_engines > 1 and len(fixed) > 1 and not self.rounds:
            engines = {(name, 0): self._ready(name, 1)[0] for name in fixed}
            self._with_streams(engines, lambda streams: self._take_race(fixed, streams))
        self._engines()

    def extend(self, has_time: Callable[[], bool], has_more: Callable[[], bool]) -> None:
        """Take rounds after the control has been warmed up, while there is time; FIRST_ROUNDS
        while there is more of it, and one at least."""
        engines = self._engines()
        for (name, _), side in engines.items():
            if name == "auto":
                warm = Stream(side, self._tasks, self._cell.batch)
                while warm.steps < self._cell.warm_up_steps and (has_more() or not warm.steps):
                    warm.for_steps(1)
                self._warm_up_steps += warm.steps
                warm.end()
        self._with_streams(engines, lambda streams: self._take_rounds(streams, has_time, has_more))

    def _engines(self) -> dict[Turn, Side]:
        """Return the engines of the sides that are left, by side and number."""
        found: dict[Turn, Side] = {}
        for name in self._names:
            most = NUM_FIXED_ENGINES if name.startswith("k") else self._num_engines
            sides = self._ready(name, min(most, self._num_engines))
            found |= {(name, number): side for number, side in enumerate(sides)}
        return found

    def _with_streams(
        self, engines: Mapping[Turn, Side], take: Callable[[Mapping[Turn, Stream]], None]
    ) -> None:
        """Take rounds on streams of requests, and count their drafts."""
        streams = {
            turn: Stream(side, self._tasks, self._cell.batch) for turn, side in engines.items()
        }
        try:
            take(streams)
            for (name, _), side in engines.items():
                _refuse_errors(name, side)
        finally:
            for (name, _), stream in streams.items():
                for place, more in enumerate(stream.drafted()):
                    self._drafted[name][place] += more
                stream.end()

    def _take_race(self, names: list[str], streams: Mapping[Turn, Stream]) -> None:
        for found in self._turns.rounds(streams, self._names):
            self._race.append(found)
            self._leave_out(self._race, names)
            if len(self._race) >= SOME_ROUNDS:
                return

    def _take_rounds(
        self,
        streams: Mapping[Turn, Stream],
        has_time: Callable[[], bool],
        has_more: Callable[[], bool],
    ) -> None:
        check = 0.0
        for found in self._turns.rounds(streams, self._names):
            self._tokens += self._cell.round_tokens
            self.rounds.append(found)
            num = len(self.rounds)
            if num >= check or num in (MIN_ROUNDS, min_rounds(self._cell)):
                check = min(num * CHECK_TIMES, MAX_ROUNDS)
                self._leave_out(self.rounds, [name for name in self._names if name != "auto"])
                if self.has_ended:
                    return
            if not (has_time() or (num < FIRST_ROUNDS and has_more())):
                return

    def _leave_out(self, rounds: Sequence[Round], names: Sequence[str]) -> None:
        """Take the sides out of later rounds that are clearly not the best of `names`."""
        left = [name for name in names if name in self._names]
        for name in slower_sides(self._cell, rounds, left):
            self._names.remove(name)

    def summary(self) -> dict[str, Any]:
        """Return ratios of speed with the intervals of those of the control, and what they are of:
        tokens of each engine, how many engines and rounds, and how equal engines differ."""
        rounds = clipped(self.rounds)
        rows, drafted, accepted = self._drafted["auto"]
        fixed = [counts for name, counts in self._drafted.items() if name.startswith("k")]
        tried, right = (sum(one[place] for one in fixed) for place in (1, 2))
        race = clipped(self._race)
        return {
            "rounds": len(self.rounds),
            "tokens": self._tokens,
            "engines": {name: len(values) for name, values in self.rounds[0].items()},
            "warm_up_steps": self._warm_up_steps,
            "disturbed": self._turns.num_disturbed,
            "clipped": num_clipped(self.rounds, rounds),
            "speedups": {
                name: round(side_ratio(rounds if name in rounds[0] else race, "off", name).value, 3)
                for name in self._all
                if name != "off"
            },
            "speedup_interval": self.speed.shown(),
            "best_fixed": self.best_fixed,
            "control_of_best": round(self.share.value, 3),
            "control_interval": self.share.shown(),
            "half_width": round(self.width, 4),
            "off_of_off": off_of_off(rounds),
            "drafted": drafted,
            "acceptance": round(accepted / drafted, 4) if drafted else None,
            "acceptance_of_fixed": round(right / tried, 4) if tried else None,
            "tokens_per_row_with_drafts": round(1 + accepted / rows, 3) if rows else None,
        }


def _refuse_errors(name: str, side: Side) -> None:
    """Raise SystemExit if speculation failed on an engine: drafts are missing then."""
    stats = side.core.stats()
    if stats.draft_errors_total or stats.draft_proposer_errors_total:
        raise SystemExit(
            f"{name}: {stats.draft_errors_total} errors of the control of drafts and "
            f"{stats.draft_proposer_errors_total} of a proposer (see the log); nothing is reported"
        )


def min_rounds(cell: Cell) -> int:
    """Return the rounds until a cell may end before its time."""
    answers = MIN_ANSWERS * cell.num_tokens * cell.batch if cell.is_small else 0
    return max(MIN_ROUNDS, -(-answers // cell.round_tokens))
