"""PastTotals: the counters of engines that have ended, equal in all API processes of a server.

Each process sees the last counters of an engine by itself. The first writes them to a file of the
life that ended, and all of them, also processes that start later, count what lies there. Knows no
engine. Always holds: each life is counted once; without a folder there is one process.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from quire.base.engine_stats import EngineStats
from quire.base.wire import Wire
from quire.engine.data_parallel.sums import only_totals, sum_of_stats

_PREFIX = "ended-"


class PastTotals:
    """folder: that all processes share; None for one process. total: None while none has ended."""

    def __init__(self, folder: Path | None = None) -> None:
        self.total: EngineStats | None = None
        self._folder = folder
        self._known: set[str] = set()
        self._wire = Wire(EngineStats)
        self.read()

    def add(self, number: int, stats: EngineStats, *, sleeps: int = 0) -> None:
        """Count an engine that has ended after so many restarts as its counters say, and so many
        sleeps."""
        name = f"{_PREFIX}{number}-{stats.restarts_total}-{sleeps}"
        if self._folder is None:
            self._count(name, only_totals(stats))
            return
        if stats.steps_total and not (self._folder / name).exists():
            own = self._folder / f"{name}.{os.getpid()}.new"
            try:
                own.write_bytes(self._wire.encode(only_totals(stats)))
                with suppress(FileExistsError):  # another process was first
                    os.link(own, self._folder / name)
            except OSError:  # no room: this process counts what it has seen
                self._count(name, only_totals(stats))
            own.unlink(missing_ok=True)
        self.read()

    def read(self) -> None:
        """Count what other processes have seen."""
        if self._folder is None:
            return
        for path in self._folder.glob(f"{_PREFIX}*[0-9]"):
            if path.name not in self._known:
                self._count(path.name, self._wire.decode(path.read_bytes()))

    def _count(self, name: str, totals: EngineStats) -> None:
        if name not in self._known:
            self._known.add(name)
            self.total = totals if self.total is None else sum_of_stats([self.total, totals])
