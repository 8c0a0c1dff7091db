"""API processes join the engine once each, however its start and theirs overlap."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api.workers import supervisor
from quire.api.workers.supervisor import _Supervisor
from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.engine.process.messages import Join, Ready
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
    def write(self, raw: bytes) -> None:
        """Take a job."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Supervisor]:
    monkeypatch.setattr(supervisor, "ProcessLink", _Link)
    monkeypatch.setattr(supervisor, "share_counts", lambda folder: None)
    monkeypatch.setattr(series, "restarts_counter", lambda: None)
    engine: Any = SimpleNamespace(folder=tmp_path, client=0)
    config, server = EngineConfig(), ServerConfig(api_processes=2)
    with socket.socket() as listening:
        yield _Supervisor(
            engine, config, server, listening, None, Log("server"), lambda done, total: None
        )


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
    made._engine_loaded = asyncio.Event()
    asyncio.run(start())
    link: Any = made._link
    return [message.client for message in link.sent if isinstance(message, Join)]


@pytest.mark.parametrize("ready_at", [1, 2, None], ids=["first", "second", "after both"])
def test_each_process_joins_an_engine_that_is_ready_while_they_start(
    made: _Supervisor, monkeypatch: pytest.MonkeyPatch, ready_at: int | None
) -> None:
    joined = _started(
        made, monkeypatch, lambda number: made._on_message(READY) if number == ready_at else None
    )
    if ready_at is None:
        made._on_message(READY)
        link: Any = made._link
        joined = [message.client for message in link.sent]
    assert sorted(joined) == [1, 2]


def test_a_process_that_has_ended_does_not_join(
    made: _Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _started(made, monkeypatch, lambda number: None)
    ended: Any = made._children[0].process
    ended.returncode = -9
    made._on_message(READY)
    link: Any = made._link
    assert [message.client for message in link.sent] == [2]
