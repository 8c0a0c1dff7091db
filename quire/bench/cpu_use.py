"""CPU use of a process tree, of other processes and of other virtual machines, and memory use.

Reads /proc. What is busy outside the tree is foreign, and so is stolen time. Where /proc does not
exist, as outside Linux, the shares are None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Busy cores in an interval: of the process tree, of other processes, and stolen."""

    own_cores: float | None
    foreign_cores: float | None
    stolen_cores: float | None


class CpuWatch:
    """Measures from its creation to each `use()`. `roots`: process ids of the own trees.

    All descendants of a root count, also those that have ended.
    """

    def __init__(self, roots: Iterable[int], *, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._roots = tuple(roots)
        self._tick_hz = os.sysconf("SC_CLK_TCK")
        self._start_s = time.monotonic()
        self._start = self._ticks()

    def use(self) -> CpuUse:
        """Return the CPU use since this watch was created."""
        seconds = max(time.monotonic() - self._start_s, 1e-9)
        end = self._ticks()
        if self._start is None or end is None:
            return CpuUse(own_cores=None, foreign_cores=None, stolen_cores=None)
        busy, stolen, own = (
            (after - before) / self._tick_hz / seconds
            for before, after in zip(self._start, end, strict=True)
        )
        return CpuUse(own_cores=own, foreign_cores=max(busy - own, 0.0), stolen_cores=stolen)

    def _ticks(self) -> tuple[int, int, int] | None:
        """Return (busy, stolen, own) ticks so far. Busy is user, nice, system, irq and soft irq."""
        try:
            fields = (self._proc / "stat").read_text().splitlines()[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, fields[:8])
        tree = _tree(self._proc, self._roots)
        return user + nice + system + irq + soft_irq, steal, sum(tree.values())


def peak_rss_bytes(pid: int, *, root: Path = Path("/")) -> int:
    """Return the summed peak resident memory of a process and its descendants; 0 if unknown.

    An upper bound where they peaked at different times or share pages.
    """
    members = _tree(root / "proc", (pid,))
    return sum(_status_bytes(root / "proc" / str(member), "VmHWM:") for member in members)


def own_bytes(pid: int, *, root: Path = Path("/")) -> dict[int, int]:
    """Return the current memory of a process and its descendants, by process.

    Pages that are only mapped from files are not counted: the system can reclaim them.
    """
    proc = root / "proc"
    return {
        member: _status_bytes(proc / str(member), "RssAnon:")
        + _status_bytes(proc / str(member), "RssShmem:")
        for member in _tree(proc, (pid,))
    }


def rss_bytes(pid: int, *, root: Path = Path("/")) -> int:
    """Return the resident memory of a process; 0 if unknown."""
    return _status_bytes(root / "proc" / str(pid), "VmRSS:")


def _status_bytes(process: Path, what: str) -> int:
    try:
        status = (process / "status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    return 0


def _tree(proc: Path, roots: Iterable[int]) -> dict[int, int]:
    """Return ticks by process id of the roots and their descendants, including ended ones."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if not folder.name.isdigit():
            continue
        try:
            # The name, field 2, is in parentheses and may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended just now
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    members = set(roots) & set(parents)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in members} - members
        members |= below
        grown = bool(below)
    return {pid: ticks[pid] for pid in members}
