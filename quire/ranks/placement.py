"""Which processors each rank runs on, and binding a thread to them.

Ranks get consecutive cores, with their hyperthreads, in the order of NUMA nodes, so that a rank's
memory is near its cores. Knows no process. Reads /sys; elsewhere processors are taken in order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_THREADS = Path("/proc/self/task")
# Where each thread ran that run_on has bound, by its number.
_before: dict[int, set[int]] = {}


def cpus_of_ranks(degree: int, *, root: Path = _CPUS) -> list[tuple[int, ...]]:
    """Return the processors of each rank: equal shares of the cores that this thread may run on, or
    might before it was bound for another executor.

    Empty where there are fewer cores than ranks, or the system binds no threads.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * degree
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(_before.get(threading.get_native_id()) or os.sched_getaffinity(0)):
        cores.setdefault((_node_of(cpu, root), _siblings(cpu, root)), []).append(cpu)
    ordered = [cores[core] for core in sorted(cores, key=lambda core: (core[0], cores[core][0]))]
    each = len(ordered) // degree
    if each == 0:
        return [()] * degree
    return [
        tuple(cpu for core in ordered[rank * each : (rank + 1) * each] for cpu in core)
        for rank in range(degree)
    ]


def run_on(cpus: Sequence[int]) -> Callable[[], None]:
    """Bind the calling thread, and the threads it starts from now on; nothing for no processors.

    Returns what lets the thread run where it ran before, called from any thread; threads that it
    has started stay bound. A system that refuses leaves it as it is: binding is for speed only.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return _nothing
    thread = threading.get_native_id()
    before = _before.get(thread) or os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return _nothing
    bound = os.sched_getaffinity(0)
    _before[thread] = before

    def unbind() -> None:
        _before.pop(thread, None)
        is_here = (_THREADS / str(thread)).exists()  # the number may be another process's by now
        with suppress(OSError):
            if is_here and os.sched_getaffinity(thread) == bound:
                os.sched_setaffinity(thread, before)

    return unbind


@contextmanager
def running_on(cpus: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread meanwhile, as run_on does: what it starts stays bound."""
    unbind = run_on(cpus)
    try:
        yield
    finally:
        unbind()


def _nothing() -> None:
    """Nothing was bound."""


def _node_of(cpu: int, root: Path) -> int:
    nodes = sorted((root / f"cpu{cpu}").glob("node[0-9]*"))
    return int(nodes[0].name.removeprefix("node")) if nodes else 0


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
