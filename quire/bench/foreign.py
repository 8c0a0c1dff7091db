"""Who else used the processors while something was measured.

Reads /proc: busy time of all CPUs, and of a tree of processes. What is busy beyond the tree is
foreign, and so is time the hypervisor gave to others ("steal"). Where /proc does not exist, as
outside Linux, nothing is known and the shares are None.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Cores kept busy in an interval: by a tree of processes, by others, by other machines."""

    own_cores: float | None
    foreign_cores: float | None
    stolen_cores: float | None


class CpuWatch:
    """Started when made; `use()` tells of the time since. `roots`: the process ids that are own.

    Everything a root started, and started again, belongs to it, also if it has ended since.
    """

    def __init__(self, roots: Iterable[int], *, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._roots = tuple(roots)
        self._tick_hz = os.sysconf("SC_CLK_TCK")
        self._start_s = time.monotonic()
        self._start = self._ticks()

    def use(self) -> CpuUse:
        """What was busy since this watch was made."""
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
        """(busy, stolen, own) so far. Busy is user, nice, system, irq and soft irq."""
        try:
            fields = (self._proc / "stat").read_text().splitlines()[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, fields[:8])
        tree = _tree(self._proc, self._roots)
        return user + nice + system + irq + soft_irq, steal, sum(tree.values())


def peak_rss_bytes(pid: int, *, root: Path = Path("/")) -> int:
    """The most memory a process and those it started held: the sum of their own peaks.

    An upper bound where they peaked at different times or share pages. 0 where unknown.
    """
    members = _tree(root / "proc", (pid,))
    return sum(_status_bytes(root / "proc" / str(member), "VmHWM:") for member in members)


def own_bytes(pid: int, *, root: Path = Path("/")) -> dict[int, int]:
    """Memory that a process and those it started hold now, by process, but for what is only mapped
    from files, which the system can take back."""
    proc = root / "proc"
    return {
        member: _status_bytes(proc / str(member), "RssAnon:")
        + _status_bytes(proc / str(member), "RssShmem:")
        for member in _tree(proc, (pid,))
    }


def rss_bytes(pid: int, *, root: Path = Path("/")) -> int:
    """Memory a process holds now. 0 where unknown."""
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
    """Ticks by process id: of the roots and all below them, their ended children included."""
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
