"""The memory probe reads all of its memory; the processor watch separates own time from others'."""

from __future__ import annotations

import os
from pathlib import Path

from quire.bench.cpu_use import CpuWatch, own_bytes, peak_rss_bytes
from quire.bench.reading import ReadProbe


def test_the_probe_returns_a_rate_for_any_number_of_threads() -> None:
    for threads in (1, 3):
        with ReadProbe(threads, num_bytes=1 << 20) as probe:
            assert probe.gb_per_s(rounds=2) > 0


def _machine(folder: Path, *, cpu: str, processes: dict[int, tuple[int, int]]) -> None:
    """Write /proc with process id -> (parent, ticks)."""
    proc = folder / "proc"
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {cpu}\n")
    (proc / "meminfo").write_text("")
    for pid, (parent, ticks) in processes.items():
        own = proc / str(pid)
        own.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0"]
        (own / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")
        (own / "status").write_text(f"Name:\tx\nVmHWM:\t    {pid} kB\n")


def test_time_of_the_process_tree_is_own_and_the_rest_is_foreign(tmp_path: Path) -> None:
    hz = os.sysconf("SC_CLK_TCK")
    before = {10: (1, 0), 11: (10, 0), 12: (11, 0), 20: (1, 0)}
    _machine(tmp_path, cpu="0 0 0 0 0 0 0 0 0 0", processes=before)
    watch = CpuWatch([10], root=tmp_path)
    after = {10: (1, 1 * hz), 11: (10, 2 * hz), 12: (11, 3 * hz), 20: (1, 4 * hz)}
    _machine(tmp_path, cpu=f"{10 * hz} 0 0 99 7 0 0 {5 * hz} 0 0", processes=after)
    use = watch.use()
    assert use.own_cores is not None
    assert use.foreign_cores is not None
    assert use.stolen_cores is not None
    assert round(use.foreign_cores / use.own_cores, 6) == round(4 / 6, 6)
    assert round(use.stolen_cores / use.own_cores, 6) == round(5 / 6, 6)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    use = CpuWatch([1], root=tmp_path).use()
    assert (use.own_cores, use.foreign_cores, use.stolen_cores) == (None, None, None)
    assert peak_rss_bytes(1, root=tmp_path) == 0


def test_peak_memory_is_that_of_the_tree(tmp_path: Path) -> None:
    _machine(tmp_path, cpu="0 " * 10, processes={10: (1, 0), 11: (10, 0), 20: (1, 0)})
    assert peak_rss_bytes(10, root=tmp_path) == 21 * 1024


def test_mapped_file_memory_is_not_a_processs_own(tmp_path: Path) -> None:
    _machine(tmp_path, cpu="0 " * 10, processes={10: (1, 0), 11: (10, 0), 20: (1, 0)})
    status = "RssAnon:\t7 kB\nRssFile:\t100 kB\nRssShmem:\t2 kB\n"
    (tmp_path / "proc" / "11" / "status").write_text(status)
    assert own_bytes(10, root=tmp_path) == {10: 0, 11: 9 * 1024}
