"""Memory and cores that this process may use, including control group limits.

Reads /proc and /sys/fs/cgroup (versions 1 and 2, the process's own group and all its ancestors); if
they do not exist, as outside Linux, falls back to sysconf. `root` lets tests simulate a machine.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import SettingError
from quire.config.process_limits import address_space_left

# Compute threads wait for each other in every operation; a few too many are for tests.
_MAX_THREADS_PER_CORE, _MIN_ALLOWED_THREADS = 4, 8
ADDRESS_SPACE = "address space"
_RAISE_ADDRESS_SPACE = "raise the limit (`ulimit -v unlimited`)"
_RAISE_GROUP = "raise the limit of the container or the systemd unit, free memory in it"
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Bytes this process may still allocate.

    limit: the source of the limit: "free memory", "control group", "address space", or a device's
    name. is_own: memory not shared with other processes, so the cache may take all of it. remedy:
    what raises the limit.
    """

    available_bytes: int
    limit: str
    is_own: bool = False
    remedy: str = "free memory"


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the minimum of free memory, of what each enclosing control group leaves, and of the
    address space that is left."""
    lowest = MachineMemory(available_bytes=_free_memory_bytes(root), limit="free memory")
    for folder in _group_folders(root, "memory"):
        left_bytes = _left_in_group_bytes(folder)
        if left_bytes is not None and left_bytes < lowest.available_bytes:
            lowest = MachineMemory(
                available_bytes=left_bytes, limit="control group", remedy=_RAISE_GROUP
            )
    left_bytes = address_space_left(root)
    if left_bytes is not None and left_bytes < lowest.available_bytes:
        lowest = MachineMemory(
            available_bytes=left_bytes, limit=ADDRESS_SPACE, remedy=_RAISE_ADDRESS_SPACE
        )
    return lowest


def shared_memory(memory: MachineMemory, num_engines: int) -> MachineMemory:
    """Return the part of one of several engines; a device's memory is not divided."""
    if num_engines == 1 or memory.is_own:
        return memory
    return replace(
        memory,
        available_bytes=memory.available_bytes // num_engines,
        limit=f"{memory.limit}, for each of {num_engines} engines",
    )


def stores_files(path: Path) -> bool:
    """Return whether the file system of an existing path has any size: /proc and /sys have none."""
    return shutil.disk_usage(path).total > 0


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return the cores this process may run on, at least 1, limited by the control group's quota.

    The quota is rounded up. Hyperthreads count as one core: they share its arithmetic units and
    caches, so kernels gain nothing from a second thread there, and wait for each other.
    """
    count = _num_cores(root)
    for folder in _group_folders(root, "cpu"):
        quota = _quota_cpus(folder)
        if quota is not None:
            count = min(count, math.ceil(quota))
    return max(count, 1)


def num_compute_threads(asked: int | None) -> int:
    """Return the number of compute threads: those asked for, else one per usable core.

    Raises SettingError for so many that they wait for each other all the time.
    """
    cores = num_usable_cores()
    if asked is None:
        return cores
    allowed = max(_MAX_THREADS_PER_CORE * cores, _MIN_ALLOWED_THREADS)
    if asked > allowed:
        raise SettingError(
            f"num_threads is {asked}, and this process may use {cores} CPU cores; at most "
            f"{allowed} are allowed here. More than one per core are slower: leave it out, for "
            f"{cores}"
        )
    return asked


def _num_cores(root: Path) -> int:
    """Count the cores of the CPUs this process may run on; a CPU without topology is a core."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    folder = root / "sys" / "devices" / "system" / "cpu"
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = _lines(folder / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings[0] if siblings else str(cpu))
    return len(cores)


def _free_memory_bytes(root: Path) -> int:
    for line in _lines(root / "proc" / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_folders(root: Path, controller: str) -> list[Path]:
    """Return the directories of this process's groups that may limit `controller`, innermost first.

    Inside a container the path in /proc may not exist under /sys; then the top of the mount is the
    container's own group, so the top is always included.
    """
    mount = root / "sys" / "fs" / "cgroup"
    folders: list[Path] = []
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, names, path = line.split(":", 2)
        if names == "":
            top = mount
        elif controller in names.split(","):
            top = next((mount / n for n in (controller, names) if (mount / n).is_dir()), mount)
        else:
            continue
        here = top / path.lstrip("/")
        while here != top and top in here.parents:
            folders.append(here)
            here = here.parent
        folders.append(top)
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _left_in_group_bytes(folder: Path) -> int | None:
    """Return limit minus usage; page cache that can be dropped does not count as used."""
    for limit_name, usage_name, droppable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
        used = max((usage or 0) - int(stat.get(droppable, 0)), 0)
        return max(limit - used, 0)
    return None


def _quota_cpus(folder: Path) -> float | None:
    for line in _lines(folder / "cpu.max"):
        quota, period = line.split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = (
        _number(folder / "cpu.cfs_quota_us"),
        _number(folder / "cpu.cfs_period_us"),
    )
    if quota_us is None or not period_us or quota_us <= 0:
        return None
    return quota_us / period_us


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].lstrip("-").isdigit() else None
