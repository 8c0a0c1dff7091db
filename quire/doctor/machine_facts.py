"""MachineFacts: what the system says of this machine, read once.

Reads /proc, /sys and limits of this process; `root` lets tests simulate a machine. What cannot be
read is None or empty. Opens no connection and loads no model; the compiled module is
imported in a function, since a broken one is a finding.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quire.config.machine import MachineMemory, machine_memory, num_usable_cores, stores_files
from quire.hub.cache import cache_dir, token_file

_CPUS = Path("sys/devices/system/cpu")
_MEMORY = Path("sys/kernel/mm")
_FREE_HUGE_PAGES = "hugepages/hugepages-2048kB/free_hugepages"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModule:
    """The compiled module. isa: of its kernels in use; available: all that run here.

    error: why it cannot be imported, "" where it can.
    """

    isa: str = ""
    available: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory that is or will be written. free_bytes: of its file system.

    is_writable: files can be made in it, or in the nearest directory above it that exists.
    has_disk: its file system has a size, unlike /proc.
    """

    name: str
    path: Path
    free_bytes: int
    is_writable: bool
    has_disk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """This machine in numbers and names. See the checks for what they mean.

    asked_isa: of the environment variable QUIRE_ISA. open_files: soft and hard limit, None for no
    limit. huge_pages: the selected mode; shared_huge_pages: for memory that processes share;
    free_huge_pages: reserved ones of 2 MiB. governors: of all CPUs, sorted. token_mode: the
    permission bits of the Hugging Face token file. gpu_driver: the driver's version, "" without a
    driver.
    """

    python: tuple[int, int, int]
    native: NativeModule
    architecture: str
    cpu_model: str
    cpu_flags: frozenset[str]
    asked_isa: str
    num_cpus: int
    affinity: frozenset[int]
    num_cores: int
    is_smt: bool | None
    memory: MachineMemory
    total_bytes: int
    places: tuple[Place, ...]
    temporary: Place
    huge_pages: str
    governors: tuple[str, ...]
    governor_driver: str
    load: float
    open_files: tuple[int | None, int | None]
    shm_bytes: int | None
    clock_source: str
    nodes: Mapping[str, frozenset[int]]
    gpus: tuple[str, ...]
    gpu_driver: str
    libraries: frozenset[str]
    token_file: Path
    token_mode: int | None
    shared_huge_pages: str = ""
    free_huge_pages: int = 0


def read_machine(
    root: Path = Path("/"), *, places: Mapping[str, Path] | None = None, asked_isa: str = ""
) -> MachineFacts:
    """Read the facts. places: directories by what they are for, beside the model cache."""
    fields = _cpuinfo(root)
    has_affinity = hasattr(os, "sched_getaffinity")
    affinity = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    named = {"model cache": cache_dir(), **(places or {})}
    token = token_file()
    return MachineFacts(
        python=sys.version_info[:3],
        native=read_native(),
        architecture=platform.machine(),
        cpu_model=fields.get("model name", platform.machine()),
        cpu_flags=frozenset(fields.get("flags", fields.get("Features", "")).split()),
        asked_isa=asked_isa,
        num_cpus=os.cpu_count() or 1,
        affinity=frozenset(affinity),
        num_cores=num_usable_cores(root),
        is_smt={"0": False, "1": True}.get(_text(root / _CPUS / "smt" / "active")),
        memory=machine_memory(root),
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        places=tuple(_place(name, path) for name, path in named.items()),
        temporary=_place("temporary files", _temporary()),
        huge_pages=_selected(_text(root / _MEMORY / "transparent_hugepage/enabled")),
        shared_huge_pages=_selected(_text(root / _MEMORY / "transparent_hugepage/shmem_enabled")),
        free_huge_pages=int(_text(root / _MEMORY / _FREE_HUGE_PAGES) or 0),
        governors=_governors(root),
        governor_driver=_text(root / _CPUS / "cpu0" / "cpufreq" / "scaling_driver"),
        load=os.getloadavg()[0],
        open_files=_open_files(),
        shm_bytes=_file_system_bytes(root / "dev" / "shm"),
        clock_source=_text(
            root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        ),
        nodes=_nodes(root),
        gpus=_gpus(root),
        gpu_driver=_text(root / "proc/driver/nvidia/version").partition("\n")[0],
        libraries=frozenset(name for name in ("torch", "triton") if find_spec(name) is not None),
        token_file=token,
        token_mode=_mode(token),
    )


def read_native() -> NativeModule:
    """Import the compiled module and return its instruction sets."""
    try:
        from quire import _native

        return NativeModule(isa=_native.isa(), available=tuple(_native.available_isas()))
    except (ImportError, RuntimeError) as error:  # RuntimeError: of an unknown QUIRE_ISA
        return NativeModule(error=str(error))


def _place(name: str, path: Path) -> Place:
    path = path.expanduser()
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return Place(
        name=name,
        path=path,
        free_bytes=shutil.disk_usage(there).free,
        is_writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        has_disk=stores_files(there),
    )


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # not one of the usual directories can be written
        return Path(os.environ.get("TMPDIR", "/tmp"))


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of the first processor."""
    fields = {}
    for line in _text(root / "proc" / "cpuinfo").split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def _governors(root: Path) -> tuple[str, ...]:
    files = (root / _CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor")
    return tuple(sorted({text for file in files if (text := _text(file))}))


def _nodes(root: Path) -> dict[str, frozenset[int]]:
    """Return the CPUs of each NUMA node that has some."""
    found = {}
    for file in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist")):
        cpus = frozenset(_cpu_list(_text(file)))
        if cpus:
            found[file.parent.name] = cpus
    return found


def _cpu_list(text: str) -> Iterable[int]:
    """Parse a list such as 0-3,8."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last or first) + 1)


def _gpus(root: Path) -> tuple[str, ...]:
    """Return the models of the NVIDIA GPUs that the driver lists."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = []
    for file in files:
        fields = dict(line.partition(":")[::2] for line in _text(file).splitlines())
        models.append(fields.get("Model", "GPU").strip())
    return tuple(models)


def _open_files() -> tuple[int | None, int | None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def _file_system_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _mode(file: Path) -> int | None:
    try:
        return stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return None


def _selected(text: str) -> str:
    """Return the word in brackets of a list such as `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
