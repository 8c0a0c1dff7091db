"""API processes join each engine once, however its start and theirs overlap; the server ends with
its last engine."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api.workers import engine_supervisor, supervisor
from quire.api.workers.engine_supervisor import EngineSupervisor
from quire.api.workers.supervisor import _Supervisor
from quire.base.errors import SettingError, WorkerError
from quire.base.log import Log
from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.engine.process.messages import Failed, Fault, Join, Ready
from quire.engine.supervised.restarts import Restarts
from quire.obs import series

READY = Ready(card=None, notes=())  # type: ignore[arg-type]


class _Link:
    """Keep what is sent to the engine."""

    def __init__(self, engine: object) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True


class _Pipe:
    """Keep what a process is sent."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, raw: bytes) -> None:
        """Take a job, or an order."""
        self.lines.append(raw)


def _engine(folder: Path) -> Any:
    return SimpleNamespace(folder=folder, client=0, cpus=(), failure=lambda: b"", wait=lambda s: 9)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Supervisor]]:
    """Return what makes a supervisor of so many engines."""
    monkeypatch.setattr(engine_supervisor, "ProcessLink", _Link)
    monkeypatch.setattr(supervisor, "share_counts", lambda folder: None)
    monkeypatch.setattr(series, "restarts_counter", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config, server = EngineConfig(), ServerConfig(api_processes=2)
    with socket.socket() as listening:

        def make(num_engines: int = 1) -> _Supervisor:
            engines = [(config, _engine(tmp_path / str(at))) for at in range(num_engines)]
            return _Supervisor(
                engines, server, listening, None, Log("server"), lambda done, total: None
            )

        yield make


@pytest.fixture
def made(make: Callable[..., _Supervisor]) -> _Supervisor:
    return make()


def _joined(made: _Supervisor, engine: int = 0) -> list[int]:
    link: Any = made._engines[engine]._link
    return [message.client for message in link.sent if isinstance(message, Join)]


def _started(
    made: _Supervisor, monkeypatch: pytest.MonkeyPatch, during: Callable[[int], None]
) -> list[int]:
    """Start all processes, and return those that have joined. during: called in each start."""

    async def create(*words: str, **settings: Any) -> Any:
        number = made._num_started
        await asyncio.sleep(0)
        during(number)
        return SimpleNamespace(pid=number, stdin=_Pipe(), returncode=None)

    async def start() -> None:
        for slot in range(made._num):
            made._children[slot] = await made._start(slot)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    asyncio.run(start())
    return _joined(made)


@pytest.mark.parametrize("ready_at", [1, 2, None], ids=["first", "second", "after both"])
def test_each_process_joins_an_engine_that_is_ready_while_they_start(
    made: _Supervisor, monkeypatch: pytest.MonkeyPatch, ready_at: int | None
) -> None:
    engine = made._engines[0]
    joined = _started(
        made, monkeypatch, lambda number: engine._on_message(READY) if number == ready_at else None
    )
    if ready_at is None:
        engine._on_message(READY)
        joined = _joined(made)
    assert sorted(joined) == [1, 2]


def test_a_process_that_has_ended_does_not_join(
    made: _Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _started(made, monkeypatch, lambda number: None)
    ended: Any = made._children[0].process
    ended.returncode = -9
    made._engines[0]._on_message(READY)
    assert _joined(made) == [2]


def _live(made: _Supervisor) -> None:
    """Give it the events that it makes in its loop."""
    made._stopped, made._died, made._any_engine = asyncio.Event(), asyncio.Event(), asyncio.Event()


def test_processes_join_all_engines_and_get_the_death_of_one_that_ends_meanwhile(
    make: Callable[..., _Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(2)
    _live(made)
    made.announced = True
    first, second = made._engines

    def during(number: int) -> None:
        if number == 1:
            first._on_message(READY)
            second._on_message(READY)
        else:
            second._on_end("it was killed")

    _started(made, monkeypatch, during)
    assert _joined(made, 0) == [1, 2]
    lines = [list(made._children[slot].process.stdin.lines) for slot in (0, 1)]  # type: ignore[union-attr]
    jobs = [json.loads(one[0]) for one in lines]
    assert [[one["number"] for one in job["engines"]] for job in jobs] == [[0, 1], [0]]
    assert lines[0][1:] == [b"engine-ended 1 9 \n"]
    assert lines[1][1:] == []
    made._own_home.remove()  # type: ignore[union-attr]


@pytest.mark.parametrize("announced", [False, True])
def test_the_server_ends_with_its_last_engine_or_with_one_that_does_not_start(
    make: Callable[..., _Supervisor], announced: bool
) -> None:
    made = make(2)
    _live(made)
    made.announced = announced
    first, second = made._engines
    second._on_message(Failed(fault=Fault(kind="CapacityError", message="no memory")))
    second._on_end("exit code 1")
    assert made._died.is_set() is not announced
    first._on_end("it was killed")
    assert made._died.is_set()
    assert made._reason.args[0] == ("it was killed" if announced else "no memory")
    made._own_home.remove()  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", ["launch", "link"])
def test_an_engine_that_cannot_be_started_again_is_ended_once(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again after a start that failed, and not at the end of a server with other engines. A
    process that has no link is ended, too."""
    num_closed, orders, ended = 0, list[str](), list[float]()

    class Link(_Link):
        def __init__(self, engine: Any) -> None:
            if engine is started:
                raise WorkerError("the sockets of the engine process cannot be opened")
            super().__init__(engine)

        async def close(self) -> None:
            nonlocal num_closed
            num_closed += 1

    def launch(*_: object) -> Any:
        if fails == "launch":
            raise SettingError("no directory for sockets can be made")
        return started

    started = _engine(tmp_path)
    started.end = ended.append
    monkeypatch.setattr(engine_supervisor, "ProcessLink", Link)
    monkeypatch.setattr(engine_supervisor, "launch_bound", launch)
    owner: Any = SimpleNamespace(
        announced=True, engine_changed=lambda engine: None, order_all=orders.append
    )

    async def check() -> None:
        engine = EngineSupervisor(
            1, _engine(tmp_path), EngineConfig(), LogSettings(), Log("server"), owner, Restarts(1)
        )
        engine._on_end("it was ended by signal 9")
        assert engine._restarting is not None
        await engine._restarting
        assert engine.fault is not None
        assert "allows no further restart" in engine.fault.message
        assert engine.job() is None
        engine.leave(1)
        await engine.close()

    asyncio.run(check())
    assert num_closed == 1
    assert ended == ([0.0] if fails == "link" else [])
    assert [order.split()[:2] for order in orders] == [["engine-ended", "1"], ["engine-lost", "1"]]
