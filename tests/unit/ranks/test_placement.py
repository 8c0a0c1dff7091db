"""Which processors each rank gets, on machines written down as files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from quire.ranks.placement import cpus_of_ranks, run_on, running_on


def machine(root: Path, cpus: dict[int, tuple[int, str]]) -> Path:
    """Write processors by number: their NUMA node, and the hyperthreads of their core."""
    for cpu, (node, siblings) in cpus.items():
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
        (root / f"cpu{cpu}" / f"node{node}").mkdir()
    return root


def test_ranks_get_whole_cores_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two nodes of two cores; processors 4 to 7 are the hyperthreads of 0 to 3; nodes alternate.
    cpus = {cpu: (cpu % 2, f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    root = machine(tmp_path, cpus)
    assert cpus_of_ranks(2, root=root) == [(0, 4, 2, 6), (1, 5, 3, 7)]
    assert cpus_of_ranks(4, root=root) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert cpus_of_ranks(3, root=root) == [(0, 4), (2, 6), (1, 5)]
    assert cpus_of_ranks(5, root=root) == [()] * 5


def test_processors_without_a_topology_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    assert cpus_of_ranks(2, root=Path("/nowhere")) == [(1,), (3,)]


def test_a_refused_binding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(pid: int, cpus: object) -> None:
        calls.append((pid, cpus))
        raise OSError("not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    run_on((1, 2))()
    run_on(())()
    assert calls == [(0, (1, 2))]


def test_a_thread_runs_where_it_ran_before_once_its_binding_ends() -> None:
    before = os.sched_getaffinity(0)
    with running_on((one := min(before),)):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    undone = run_on((one,))
    other = threading.Thread(target=undone)  # an executor may be closed in any thread
    other.start()
    other.join()
    assert os.sched_getaffinity(0) == before


def test_a_binding_that_was_changed_since_stays() -> None:
    before = os.sched_getaffinity(0)
    undone = run_on((max(before),))
    try:
        os.sched_setaffinity(0, before)
        os.sched_setaffinity(0, {min(before)})
        undone()
        assert os.sched_getaffinity(0) == ({min(before)} if len(before) > 1 else before)
    finally:
        os.sched_setaffinity(0, before)


def test_a_bound_thread_divides_all_cores_for_a_second_executor() -> None:
    before = cpus_of_ranks(1)
    with running_on(before[0][:1]):
        assert cpus_of_ranks(1) == before
        with running_on(before[0][-1:]):
            assert cpus_of_ranks(1) == before
    assert cpus_of_ranks(1) == before
    assert os.sched_getaffinity(0) == set(before[0])


def test_the_end_of_a_thread_ends_its_binding() -> None:
    undone = []
    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=lambda: undone.append(run_on((min(before),))))
    thread.start()
    thread.join()
    undone[0]()
    assert os.sched_getaffinity(0) == before
