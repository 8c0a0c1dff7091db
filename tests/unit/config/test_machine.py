"""The machine's limits, read from synthetic /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.config import machine
from quire.config.machine import machine_memory, num_compute_threads, num_usable_cores

MIB = 2**20


def _machine(root: Path, *, free_mib: int, files: dict[str, str], groups: str) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {free_mib * 1024} kB\n",
        "proc/self/cgroup": groups,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_is_the_limit_without_a_cgroup_limit(tmp_path: Path) -> None:
    root = _machine(tmp_path, free_mib=500, files={}, groups="0::/\n")
    assert machine_memory(root).available_bytes == 500 * MIB
    assert machine_memory(root).limit == "free memory"


def test_version_2_takes_the_minimum_of_the_group_and_its_ancestors(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        free_mib=500,
        files={
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{200 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{90 * MIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {40 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.max": f"{400 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.current": f"{50 * MIB}\n",
        },
        groups="0::/a/b\n",
    )
    memory = machine_memory(root)
    assert memory.available_bytes == 150 * MIB  # reclaimable page cache does not count as used
    assert memory.limit == "control group"


def test_version_1_in_a_container_is_read_at_the_top_of_its_mount(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        free_mib=500,
        files={
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {20 * MIB}\n",
        },
        groups="4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
    )
    assert machine_memory(root).available_bytes == 220 * MIB


def test_a_huge_version_1_limit_is_none(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        free_mib=500,
        files={"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        groups="4:memory:/\n",
    )
    assert machine_memory(root).limit == "free memory"


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        free_mib=500,
        files={
            "sys/fs/cgroup/memory.max": f"{10 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{20 * MIB}\n",
        },
        groups="0::/\n",
    )
    assert machine_memory(root).available_bytes == 0


def test_a_cpu_quota_limits_the_cpus_rounded_up(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "50000 100000\n"}
    root = _machine(tmp_path / "half", free_mib=1, files=files, groups="0::/\n")
    assert num_usable_cores(root) == 1
    files = {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}
    root = _machine(tmp_path / "none", free_mib=1, files=files, groups="1:cpu,cpuacct:/\n")
    assert num_usable_cores(root) == num_usable_cores(tmp_path / "nothing here")


def test_cpus_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text
        for cpu, text in siblings.items()
    }
    root = _machine(tmp_path / "pairs", free_mib=1, files=files, groups="0::/\n")
    assert num_usable_cores(root) == 2
    files["sys/fs/cgroup/cpu.max"] = "100000 100000\n"
    root = _machine(tmp_path / "quota", free_mib=1, files=files, groups="0::/\n")
    assert num_usable_cores(root) == 1
    assert num_usable_cores(tmp_path / "nothing told") == 4


def test_this_machine_has_memory_and_a_cpu() -> None:
    assert machine_memory().available_bytes > 0
    assert num_usable_cores() >= 1


@pytest.mark.parametrize(("cores", "allowed"), [(1, 8), (2, 8), (16, 64)])
def test_more_threads_than_the_cores_can_run_are_rejected(
    cores: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_usable_cores", lambda: cores)
    assert num_compute_threads(None) == cores
    assert num_compute_threads(allowed) == allowed
    with pytest.raises(SettingError, match=f"is {allowed + 1}, and this .* {cores} CPU cores; at "):
        num_compute_threads(allowed + 1)
