"""Turns of sides: rounds in which each generates the same number of tokens of the same answers.

Where each side has an engine of its own, it goes on with its requests from turn to turn. Sides that
share an engine begin their turn with none, with the same requests in a round, and abort what runs
at its end, outside of the measured time. The order of a round is drawn, and turned round in the
next one of the same engine; so neither a drift of the machine nor the text counts. Knows no ratios.
Always holds: which rounds count does not depend on what the sides took.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from bench.speculation.cells import Cell
from bench.speculation.rounds import Round
from bench.speculation.sides import Side, Stream, Task
from quire.bench.cpu_use import CpuWatch

# A round does not count in which other programs, or machines, took so many seconds of a processor
# and such a share of the time besides; but in so many times as many rounds as count at most.
MAX_DISTURBED_TIMES = 3
FOREIGN_S, FOREIGN_SHARE = 0.03, 0.05
SEED = 11
Drafted = dict[str, list[int]]  # rows with drafts, drafts, and those accepted, by side


class Turns(Protocol):
    """Takes turns of sides. engines: the numbers of those that are shared, or (None,)."""

    engines: Sequence[int | None]

    def take(self, name: str, engine: int | None, number: int) -> float:
        """Return the seconds of a turn in round `number` of an engine."""

    def end(self) -> None:
        """Abort what is running."""


class OwnEngines:
    """Turns of sides with an engine each. The first tokens of all do not count: prompts are looked
    up, and the first steps are slow. drafted: is added to."""

    engines: Sequence[int | None] = (None,)

    def __init__(
        self, sides: Mapping[str, Side], tasks: Sequence[Task], cell: Cell, drafted: Drafted
    ) -> None:
        self._cell, self._drafted = cell, drafted
        self._streams = {name: Stream(side, tasks, cell.batch) for name, side in sides.items()}
        self._targets = dict.fromkeys(sides, cell.run_in_tokens)
        self._reached = {
            name: stream.until(cell.run_in_tokens) for name, stream in self._streams.items()
        }

    def take(self, name: str, engine: int | None, number: int) -> float:
        """See Turns."""
        self._targets[name] += self._cell.round_tokens
        before_s = self._reached[name]
        self._reached[name] = self._streams[name].until(self._targets[name])
        return self._reached[name] - before_s

    def end(self) -> None:
        """See Turns."""
        for name, stream in self._streams.items():
            _add(self._drafted[name], stream)
            stream.end()


class SharedEngines:
    """Turns of sides on engines that they share; sides[name][number] is a side of an engine."""

    def __init__(
        self,
        sides: Mapping[str, Sequence[Side]],
        tasks: Sequence[Task],
        cell: Cell,
        drafted: Drafted,
    ) -> None:
        self.engines: Sequence[int | None] = range(len(sides["off"]))
        self._sides, self._tasks, self._cell, self._drafted = sides, tasks, cell, drafted

    def take(self, name: str, engine: int | None, number: int) -> float:
        """See Turns. All sides have the tasks and the phases of the round; an engine goes through
        the tasks from round to round, each from another one on."""
        assert engine is not None, "an engine is shared"
        side, cell = self._sides[name][engine], self._cell
        first = engine * len(self._tasks) // len(self.engines)
        first += number * (cell.round_tokens // cell.num_tokens)
        stream = Stream(side, self._tasks, cell.batch, first=first, seed=(SEED, engine, number))
        try:
            before_s = stream.until(cell.run_in_tokens)
            return stream.until(cell.run_in_tokens + cell.round_tokens) - before_s
        finally:
            _add(self._drafted[name], stream)
            stream.end()

    def end(self) -> None:
        """See Turns: nothing runs."""


class Rounds:
    """Takes rounds of a cell. num_disturbed: that did not count."""

    def __init__(self) -> None:
        self.num_disturbed = 0
        self._nums: defaultdict[int | None, int] = defaultdict(int)  # that counted, by engine
        self._random = random.Random(SEED)

    def taken(self, turns: Turns, names: Sequence[str]) -> Iterator[Round]:
        """Yield rounds of the sides that are in `names` when each begins, of the engine that has
        fewest."""
        orders: dict[int | None, list[str]] = {}  # to be turned round
        while True:
            engine = min(turns.engines, key=lambda one: self._nums[one])
            if engine in orders:
                order = orders.pop(engine)[::-1]
            else:
                order = list(names)
                self._random.shuffle(order)
                orders[engine] = order
            seconds: dict[str, float] = {}
            watch, began_s = CpuWatch([os.getpid()]), time.monotonic()
            for name in [one for one in order if one in names]:
                seconds[name] = round(turns.take(name, engine, self._nums[engine]), 7)
            most = MAX_DISTURBED_TIMES * (sum(self._nums.values()) + 1)
            if self.num_disturbed < most and _is_disturbed(watch, began_s):
                self.num_disturbed += 1
                continue
            self._nums[engine] += 1
            yield Round(seconds, engine)


def _add(counts: list[int], stream: Stream) -> None:
    """Add what a stream has drafted."""
    for place, more in enumerate(stream.drafted()):
        counts[place] += more


def _is_disturbed(watch: CpuWatch, began_s: float) -> bool:
    """Return whether others took the processor since the watch began."""
    use, seconds = watch.use(), time.monotonic() - began_s
    foreign_s = ((use.foreign_cores or 0.0) + (use.stolen_cores or 0.0)) * seconds
    return foreign_s > FOREIGN_S + FOREIGN_SHARE * seconds
