"""The machine card of every result: the hardware and limits that a number was measured on.

Contains what decides speed (processor, cores, memory, instruction sets, process limits) and nothing
that identifies a machine or a person: no names, paths or addresses.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import quire._native as native

# Flags of /proc/cpuinfo that decide which kernels run, and how fast.
_TELLING_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


LOAD_MARK = "†"  # of results taken while other work ran on the machine
_OWN_LOAD = 0.5  # load average above one thread per core that a measurement itself may cause


def machine_card() -> dict[str, object]:
    """Return plain numbers and names of products, ready for JSON."""
    cpu = _cpuinfo()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "architecture": platform.machine(),
        "cores": cores,
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "instruction_sets": [flag for flag in _TELLING_FLAGS if flag in flags],
        "kernels": native.isa(),
        "limits": _limits(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "threads_of_numpy": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
    }


def is_loaded(card: Mapping[str, Any]) -> bool:
    """Return whether more threads than cores wanted to run when the card was made.

    The measurement's own threads are at most one per core, so a higher load average comes from
    other work; times of such results are upper bounds and marked LOAD_MARK.
    """
    load, cores = card.get("load_at_start"), card.get("cores")
    return load is not None and cores is not None and load > cores + _OWN_LOAD


def machine_text(card: Mapping[str, Any], *, with_load: bool = True) -> str:
    """Return the machine in one line: processor, cores, memory, and its load if too high."""
    text = f"{card['cpu']}, {card['cores']} cores, {card['memory_gb']:.0f} GB"
    if with_load and is_loaded(card):
        text += f"; {LOAD_MARK} load average {card['load_at_start']:.1f} at the start"
    return text


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    fields = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def _limits() -> dict[str, object]:
    """Return the limits of this process: memory, CPU quota, address space."""
    found: dict[str, object] = {}
    for name, file in (("memory_max", "memory.max"), ("cpu_max", "cpu.max")):
        path = Path("/sys/fs/cgroup") / file
        if path.exists():
            found[name] = path.read_text().strip()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    found["address_space"] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    found["switch_interval_ms"] = sys.getswitchinterval() * 1e3
    return found
