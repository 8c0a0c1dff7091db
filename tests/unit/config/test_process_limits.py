"""Limits of the system on a process: found before libraries abort, and named in errors."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from quire.base.errors import CapacityError, SettingError
from quire.config import process_limits
from quire.config.groups import EngineConfig
from quire.config.machine import ADDRESS_SPACE, machine_memory
from quire.engine.client.launch import EngineProcess
from tests.unit.cli.command import quire_main

MIB = 1 << 20
INFINITE = resource.RLIM_INFINITY


def _limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = INFINITE) -> None:
    monkeypatch.setattr(process_limits.resource, "getrlimit", lambda which: (soft, hard))


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (20, INFINITE, "`ulimit -n 4096`"),
        (16, 16, "`ulimit -n 4096`"),
        (20, 512, "`ulimit -n 512`"),
    ],
)
def test_an_engine_is_not_started_with_too_few_files(
    soft: int, hard: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, soft, hard)
    with pytest.raises(SettingError) as caught:
        EngineProcess.launch(EngineConfig())
    assert f"may open {soft} files (RLIMIT_NOFILE), and at least 64 are" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("soft", [INFINITE, process_limits.MIN_OPEN_FILES])
def test_enough_files_are_no_error(soft: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, soft)
    process_limits.check_open_files()


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, 524_288, (process_limits.MAX_OPEN_FILES, 524_288)),
        (1024, INFINITE, (process_limits.MAX_OPEN_FILES, INFINITE)),
        (4096, 4096, None),
        (100_000, 524_288, None),
        (INFINITE, INFINITE, None),
    ],
)
def test_a_process_may_open_as_many_files_as_its_hard_limit_allows(
    soft: int, hard: int, raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    _limit(monkeypatch, soft, hard)
    monkeypatch.setattr(
        process_limits.resource, "setrlimit", lambda which, limits: found.append(limits)
    )
    process_limits.raise_open_files()
    assert found == ([] if raised is None else [raised])


def test_a_system_that_allows_no_more_files_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(which: int, limits: tuple[int, int]) -> None:
        raise PermissionError

    _limit(monkeypatch, 64, 4096)
    monkeypatch.setattr(process_limits.resource, "setrlimit", refused)
    process_limits.raise_open_files()


def test_an_address_space_too_small_for_the_libraries_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _limit(monkeypatch, 300_000 * 1024)
    for words in (("serve", "--port", "0"), ("complete", "-p", "x")):
        done = quire_main(*words)
        assert done.returncode == 2
        assert "292 MiB of address space (RLIMIT_AS, `ulimit -v 300000`); at least 448" in (
            done.stderr
        )
    _limit(monkeypatch, process_limits.MIN_ADDRESS_SPACE)
    process_limits.check_address_space()


def test_the_address_space_that_is_left_limits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 999999 kB\n")
    (tmp_path / "proc/self/statm").write_text(f"{30 * MIB // resource.getpagesize()} 1 1 1 0 1 0\n")
    _limit(monkeypatch, 100 * MIB)
    memory = machine_memory(tmp_path)
    assert (memory.available_bytes, memory.limit) == (70 * MIB, ADDRESS_SPACE)
    assert "ulimit -v" in memory.remedy
    _limit(monkeypatch, INFINITE)
    assert machine_memory(tmp_path).limit == "free memory"


@pytest.mark.parametrize(
    ("soft", "said"),
    [
        (600_000 * 1024, "585 MiB of address space (RLIMIT_AS, `ulimit -v 600000`), of which"),
        (INFINITE, "lower --kv-cache-memory"),
    ],
)
def test_memory_that_cannot_be_allocated_is_explained(
    soft: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    _limit(monkeypatch, soft)
    assert isinstance(process_limits.out_of_memory(), CapacityError)
    monkeypatch.setattr("quire.cli.complete.pull_if_asked", fails)
    done = quire_main("complete", "-p", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("quire complete: memory could not be allocated")
    assert said in done.stderr
