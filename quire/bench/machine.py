"""The machine card that stands in every result: what a number was measured on.

Says what decides speed (processor, cores, memory, instruction sets, limits set on the process)
and nothing that identifies a machine or a person: no names, paths or addresses.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import numpy as np

import quire._native as native

# Flags of /proc/cpuinfo that decide which kernels run, and how fast.
_TELLING_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


def machine_card() -> dict[str, object]:
    """Plain numbers and names of products, ready for JSON."""
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


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields."""
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
    """What the process may use less than the machine has."""
    found: dict[str, object] = {}
    for name, file in (("memory_max", "memory.max"), ("cpu_max", "cpu.max")):
        path = Path("/sys/fs/cgroup") / file
        if path.exists():
            found[name] = path.read_text().strip()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    found["address_space"] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    found["switch_interval_ms"] = sys.getswitchinterval() * 1e3
    return found
