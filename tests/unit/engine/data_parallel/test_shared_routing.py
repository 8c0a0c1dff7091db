"""SharedRouting: what one process adds, another reads; a process that has ended leaves nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.engine.data_parallel import shared_routing
from quire.engine.data_parallel.routing_state import OpenCounts
from quire.engine.data_parallel.shared_routing import SharedRouting, create_shared_routing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "routing"
    create_shared_routing(path, num_processes=3, num_engines=2)
    return path


def test_another_process_reads_and_adds(file: Path) -> None:
    """Each maps the file by itself, as processes do; tests/serve has real ones."""
    state, other = SharedRouting(file, 0), SharedRouting(file, 2)
    names = state.block_names("scope", bytes(1024))
    assert other.block_names("scope", bytes(1024)) == names
    state.history.note(names, 1)
    state.add(1, OpenCounts(500, 2, 90, 40))
    assert other.history.matched_blocks(names, 0b11) == {0: 0, 1: len(names)}
    assert other.counts(1) == (500, 2, 90, 40)
    other.add(0, OpenCounts(70, 1))
    other.history.note(names[:2], 0)
    assert state.history.matched_blocks(names, 0b11) == {0: 2, 1: len(names)}
    assert state.counts(0) == (70, 1, 0, 0)
    state.forget_process(2)
    assert state.counts(0) == OpenCounts()
    assert other.counts(1) == (500, 2, 90, 40)
    state.add(1, OpenCounts(-500, -2, -90, -40))
    assert other.counts(1) == OpenCounts()


def test_the_file_is_private_and_made_once(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(SettingError, match="set TMPDIR"):
        create_shared_routing(file, num_processes=1, num_engines=1)


def test_a_full_file_system_is_reported_before_pages_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*sizes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared_routing.os is os
    with pytest.raises(SettingError, match="No space left on device"):
        create_shared_routing(tmp_path / "routing", num_processes=1, num_engines=2)


def test_a_system_that_reserves_no_room_has_the_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    create_shared_routing(tmp_path / "routing", num_processes=1, num_engines=2)
    state = SharedRouting(tmp_path / "routing", 0)
    state.add(1, OpenCounts(5, 1))
    assert [state.counts(number).tokens for number in range(2)] == [0, 5]
