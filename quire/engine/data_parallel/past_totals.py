"""PastTotals: the counters of engines that have ended, in all API processes of a server.

Each process has seen an engine's counters up to another step when it ends. All write what they
have seen of that life to a file each, and count the greatest of these, as do processes that start
later. Knows no engine. Always holds: each life is counted once, with no less than this process has
reported of it, so that no counter falls; after all have read, their counts are equal; without a
folder there is one process.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from quire.base.engine_stats import EngineStats
from quire.base.wire import Wire
from quire.engine.data_parallel.sums import greatest_of_stats, only_totals, sum_of_stats

_PREFIX = "ended-"
_BEING_WRITTEN = ".new"


def life_of(number: int, stats: EngineStats, *, sleeps: int = 0) -> str:
    """Return the name of an engine's life: one between two starts, after so many sleeps."""
    return f"{_PREFIX}{number}-{stats.restarts_total}-{sleeps}"


class PastTotals:
    """folder: that all processes share; None for one process. total: None while none has ended."""

    def __init__(self, folder: Path | None = None) -> None:
        self.total: EngineStats | None = None
        self._folder = folder
        self._name = secrets.token_hex(8)
        self._lives: dict[str, EngineStats] = {}
        self._known: set[str] = set()  # files that were read; without a folder, lives
        self._wire = Wire(EngineStats)
        self.read()

    @property
    def is_shared(self) -> bool:
        """Whether other processes may know more of an engine that has ended."""
        return self._folder is not None

    def add(self, number: int, stats: EngineStats, *, sleeps: int = 0) -> None:
        """Count an engine that has ended after so many restarts as its counters say, and so many
        sleeps."""
        life = life_of(number, stats, sleeps=sleeps)
        totals = only_totals(stats)
        if self._folder is not None and stats.steps_total:
            path = self._folder / f"{life}.{self._name}"
            being_written = path.with_name(f"{path.name}{_BEING_WRITTEN}")
            with suppress(OSError):  # no room: this process counts what it has seen
                being_written.write_bytes(self._wire.encode(totals))
                being_written.rename(path)
        self._count(life, totals)
        self.read()

    def without(self, running: Collection[str]) -> EngineStats | None:
        """Return the counters without those of lives that still run, as far as is known here:
        another process may have noted an end before. None if there are none."""
        if self._lives.keys().isdisjoint(running):
            return self.total
        ended = [totals for life, totals in self._lives.items() if life not in running]
        return sum_of_stats(ended) if ended else None

    def read(self) -> None:
        """Count what other processes have seen."""
        if self._folder is None:
            return
        for path in self._folder.glob(f"{_PREFIX}*"):
            if path.name not in self._known and path.suffix != _BEING_WRITTEN:
                self._known.add(path.name)
                self._count(path.stem, self._wire.decode(path.read_bytes()))

    def _count(self, life: str, totals: EngineStats) -> None:
        if not self.is_shared:  # no more will be known of it; engines may sleep very often
            if life not in self._known:
                self._known.add(life)
                self.total = sum_of_stats([totals] if self.total is None else [self.total, totals])
            return
        seen = self._lives.get(life)
        self._lives[life] = totals if seen is None else greatest_of_stats([seen, totals])
        self.total = sum_of_stats(list(self._lives.values()))
