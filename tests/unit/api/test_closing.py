"""What a server opens is closed at its end, and where its start fails."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.api import asgi, server
from quire.api.batches.journal import BatchJournal
from quire.base.errors import SettingError
from quire.base.log import Log
from quire.config.server_config import ServerConfig
from tests.unit.api.fake_engine import FakeEngine

CAUSE = "the cause"


class OwnEngine(FakeEngine):
    """An engine with a start and an end. `fails`: what `ready` raises first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ready = self.num_closed = 0
        self.fails: list[Exception] = []

    async def ready(self) -> None:
        self.num_ready += 1
        if self.fails:
            raise self.fails.pop()

    async def close(self) -> None:
        self.num_closed += 1


class Process:
    """What launch_engines returns for an engine."""

    num_ended = 0

    def end(self, timeout_s: float) -> None:
        self.num_ended += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> OwnEngine:
    """Return the engine that the application has instead of a process."""
    engine = OwnEngine()
    monkeypatch.setattr(asgi, "served_engine", lambda *_: engine)
    return engine


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    monkeypatch.setattr(asgi, "launch_engines", lambda *_: [(None, process)])
    return process


def open_files(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # that of the directory's listing
            continue
    return sorted(link for link in links if link.startswith(str(folder)))


def stores_in(folder: Path) -> dict[str, str]:
    return {"batch_store": str(folder / "batches"), "responses_store": str(folder / "responses")}


def failing_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises the first time."""
    errors = [SettingError(CAUSE)]

    def fail_or_call(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*arguments)

    return fail_or_call


@pytest.mark.parametrize("step", ["launch_engines", "served_engine", "ready", "open_spans"])
def test_a_failed_start_leaves_nothing_and_may_be_repeated(
    step: str,
    engine: OwnEngine,
    process: Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if step == "ready":
        engine.fails = [SettingError(CAUSE)]
    else:
        monkeypatch.setattr(asgi, step, failing_once(getattr(asgi, step)))

    async def story() -> None:
        app = asgi.build_asgi(**stores_in(tmp_path))
        with pytest.raises(SettingError, match=CAUSE):
            await app.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert open_files(tmp_path) == []
        assert process.num_ended == (step == "served_engine")
        assert engine.num_closed == (step in ("ready", "open_spans"))
        await app.start()
        assert engine.num_ready == 1 + engine.num_closed
        await app.stop()

    asyncio.run(story())


def test_a_store_that_cannot_be_opened_leaves_the_other_closed(
    engine: OwnEngine, process: Process, tmp_path: Path
) -> None:
    (tmp_path / "batches").write_bytes(b"no journal of batches")

    async def story() -> None:
        app = asgi.build_asgi(**stores_in(tmp_path))
        with pytest.raises(SettingError, match="batch_store"):
            await app.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert open_files(tmp_path) == []
        (tmp_path / "batches").unlink()
        await app.start()
        await app.stop()

    asyncio.run(story())


def test_each_stop_of_the_application_closes_its_stores(
    engine: OwnEngine, process: Process, tmp_path: Path
) -> None:
    async def story() -> None:
        app = asgi.build_asgi(**stores_in(tmp_path))
        for num_stops in (1, 2):
            await app.start()
            assert open_files(tmp_path)
            await app.stop()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert open_files(tmp_path) == []
            assert engine.num_closed == num_stops

    asyncio.run(story())


def test_a_journal_that_cannot_be_written_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "batches")

    async def story() -> None:
        journal = BatchJournal(path)
        await journal.run(lambda database: database.execute("PRAGMA query_only = ON").fetchall())
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            journal.close()
        assert open_files(tmp_path) == []
        BatchJournal(path).close()

    asyncio.run(story())


def test_the_server_closes_the_store_of_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "freeze_heap", lambda: None)  # of this process
    path = tmp_path / "responses"
    seen: list[list[str]] = []

    def stop() -> None:
        seen.append(open_files(tmp_path))
        signal.raise_signal(signal.SIGTERM)

    async def serve(listening: socket.socket) -> int:
        config, log = ServerConfig(responses_store=str(path)), Log("test", io.StringIO())
        process = server.ServerProcess(OwnEngine(), config, log, stop, None, None, None, None)
        exit_code = await process.run(listening, None)
        seen.append(open_files(tmp_path))
        return exit_code

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(serve(listening)) == server.EXIT_DONE
    while_serving, after = seen
    assert str(path) in while_serving
    assert after == []
