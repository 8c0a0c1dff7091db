"""Turns of engines: rounds in which each generates the same number of tokens of the same answers.

The order of a round is drawn, and turned round in every second one; so neither a drift of the
machine nor the text counts. Knows no ratios. Always holds: which rounds count does not depend on
what the sides took.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence

from bench.speculation.cells import Cell
from bench.speculation.rounds import Round
from bench.speculation.sides import Stream
from quire.bench.cpu_use import CpuWatch

Turn = tuple[str, int]  # a side and the number of its engine
# A round does not count in which other programs, or machines, took so many seconds of a processor
# and such a share of the time besides; but in so many times as many rounds as count at most.
MAX_DISTURBED_TIMES = 3
FOREIGN_S, FOREIGN_SHARE = 0.03, 0.05
SEED = 11


class Turns:
    """Takes rounds of a cell. num_disturbed: that did not count."""

    def __init__(self, cell: Cell) -> None:
        self.num_disturbed = 0
        self._cell, self._num_counted = cell, 0
        self._random = random.Random(SEED)

    def rounds(self, streams: Mapping[Turn, Stream], names: Sequence[str]) -> Iterator[Round]:
        """Yield rounds of the sides that are in `names` when each begins. The first tokens of all
        do not count: prompts are looked up, and the first steps are slow."""
        target = self._cell.run_in_tokens
        reached = {turn: stream.until(target) for turn, stream in streams.items()}
        order: list[Turn] = []
        num = 0
        while True:
            target += self._cell.round_tokens
            if num % 2:
                order.reverse()
            else:
                order = list(streams)
                self._random.shuffle(order)
            order = [turn for turn in order if turn[0] in names]
            seconds: Round = {name: [0.0] * at for name, at in _num_by_name(order).items()}
            watch, began_s = CpuWatch([os.getpid()]), time.monotonic()
            for turn in order:
                before_s, reached[turn] = reached[turn], streams[turn].until(target)
                seconds[turn[0]][turn[1]] = round(reached[turn] - before_s, 7)
            num += 1
            most = MAX_DISTURBED_TIMES * (self._num_counted + 1)
            if self.num_disturbed < most and _is_disturbed(watch, began_s):
                self.num_disturbed += 1
                continue
            self._num_counted += 1
            yield seconds


def _num_by_name(turns: Sequence[Turn]) -> dict[str, int]:
    """Return the number of engines of each side."""
    names = [name for name, _ in turns]
    return {name: names.count(name) for name in names}


def _is_disturbed(watch: CpuWatch, began_s: float) -> bool:
    """Return whether others took the processor since the watch began."""
    use, seconds = watch.use(), time.monotonic() - began_s
    foreign_s = ((use.foreign_cores or 0.0) + (use.stolen_cores or 0.0)) * seconds
    return foreign_s > FOREIGN_S + FOREIGN_SHARE * seconds
