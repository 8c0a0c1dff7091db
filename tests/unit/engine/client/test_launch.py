"""Launching the engine process: a directory with short enough socket paths, and no keys."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from quire.base.errors import SettingError, WorkerError
from quire.config.groups import EngineConfig
from quire.engine.client.launch import EngineProcess
from quire.engine.client.process_link import ProcessLink
from quire.engine.client.socket_directory import PREFIX, SocketDirectory
from quire.engine.process.channel import from_engine_wire, open_socket, socket_address
from quire.engine.process.messages import Hello, Stop


class Started:
    """A process that was never started, with its arguments."""

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.settings = settings
        self.stdin = io.BytesIO()

    def wait(self, timeout_s: float | None = None) -> int:
        return 0


def _still_runs(timeout_s: float | None = None) -> int:
    raise subprocess.TimeoutExpired("the engine", 0.0)


def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineProcess, Started]:
    started: list[Started] = []

    def start(command: list[str], **settings: Any) -> Started:
        started.append(Started(command, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return EngineProcess.launch(EngineConfig()), started[0]


def test_the_key_of_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    process, started = launched(monkeypatch)
    process.end(0)
    assert "QUIRE_API_KEY" not in started.settings["env"]
    assert started.settings["env"]["QUIRE_ISA"] == "avx2"


def test_sockets_are_not_created_where_their_path_would_be_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    process, _ = launched(monkeypatch)
    assert process.folder.is_dir()
    assert len(str(process.folder)) < 90
    process.end(0)
    assert not list(long.iterdir())


def test_an_unwritable_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(SettingError, match="/nowhere"):
        EngineProcess.launch(EngineConfig())


def test_a_directory_without_a_lock_file_is_not_left(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    """A process without descriptors can make a directory, and open nothing in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))

    def none(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none)
    with pytest.raises(SettingError, match="Too many open files"):
        SocketDirectory()
    monkeypatch.undo()
    assert not list(short_path.iterdir())


def test_a_spare_process_without_its_directory_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Services like systemd-tmpfiles remove old files, also those of a process that waits."""
    process, started = launched(monkeypatch)
    monkeypatch.setattr(started, "wait", _still_runs)
    assert process.can_begin
    shutil.rmtree(process.folder)
    assert not process.can_begin
    with pytest.raises(WorkerError, match="removed the directory"):
        ProcessLink(process)
    monkeypatch.undo()
    assert not process.can_begin
    process.end(0)


def test_an_engine_is_not_heard_before_it_can_be_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be sent requests as soon as it has said that it is ready."""
    process, started = launched(monkeypatch)
    ends = threading.Event()
    monkeypatch.setattr(started, "wait", lambda timeout_s=None: int(ends.wait() and 0))
    link, context, heard = ProcessLink(process), zmq.Context(), list[Any]()

    async def play() -> None:
        link.open(asyncio.get_running_loop(), heard.append, lambda reason: None)
        sink = open_socket(context, zmq.PUSH)
        sink.connect(socket_address(process.folder, "out"))
        sink.send(from_engine_wire().encode(Hello(protocol_version=1, process_id=1)))
        await asyncio.sleep(0.1)
        assert not heard
        assert not link.send(Stop())
        source = open_socket(context, zmq.PULL)
        source.connect(socket_address(process.folder, "in"))
        while not heard:
            await asyncio.sleep(0.001)
        assert link.send(Stop())
        ends.set()
        await link.close()
        sink.close(linger=0)
        source.close(linger=0)

    asyncio.run(asyncio.wait_for(play(), 30))
    context.term()


def test_no_usable_directory_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(SettingError, match=r"No usable temporary directory.*set TMPDIR"):
        EngineProcess.launch(EngineConfig())


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a directory with a path short enough for sockets, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield Path(folder)


def test_the_next_start_removes_the_directory_of_a_killed_server(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    start = (
        "import sys, time\n"
        "from quire.engine.client.socket_directory import SocketDirectory\n"
        "directory = SocketDirectory()\n"
        "(directory.path / 'in.0').touch()\n"
        "print(directory.path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = {**os.environ, "TMPDIR": str(short_path)}
    with subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().strip())
        running = SocketDirectory()
        assert left.is_dir()  # its server still runs
        server.kill()
    assert (left / "in.0").exists()
    strangers = short_path / f"{PREFIX}notes"
    strangers.mkdir()
    (strangers / "text").touch()
    new = SocketDirectory()
    assert sorted(short_path.iterdir()) == sorted([running.path, new.path, strangers])
    running.remove()
    new.remove()
    assert list(short_path.iterdir()) == [strangers]


def test_a_directory_removed_by_another_start_is_created_again(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    made: list[Path] = []
    flock = fcntl.flock

    def removed_before_the_lock(descriptor: int, how: int) -> None:
        if not made:
            made.extend(short_path.iterdir())
            shutil.rmtree(made[0])
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", removed_before_the_lock)
    directory = SocketDirectory()
    assert directory.path.is_dir()
    assert directory.path not in made
    directory.remove()
