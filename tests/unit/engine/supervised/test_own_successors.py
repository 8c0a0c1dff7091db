"""The spare process of an engine that sleeps: taken by the next wake, replaced where it is dead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.base.errors import SettingError, WorkerError
from quire.base.log import Log
from quire.base.log_process import LogSettings
from quire.config.flags import engine_config
from quire.engine.client.engine_client import EngineClient
from quire.engine.supervised import own_successors
from quire.engine.supervised import restarts as restarting
from quire.engine.supervised.own_successors import OwnSuccessors
from quire.engine.supervised.restarts import Restarts


class FakeProcess:
    def __init__(self, *, is_spare: bool = False) -> None:
        self.cpus = ()
        self.is_spare = is_spare
        self.has_begun = not is_spare
        self.can_begin = True
        self.has_ended = False

    def begin(self) -> None:
        self.has_begun = True

    def end(self, timeout_s: float) -> None:
        self.has_ended = True


class FakeClient:
    async def ready(self, text_side: object) -> None: ...


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """Return the processes that were started, the newest last."""
    launched: list[FakeProcess] = []

    def launch(config: object, logging: object, cpus: object, *, is_spare: bool) -> FakeProcess:
        launched.append(FakeProcess(is_spare=is_spare))
        return launched[-1]

    monkeypatch.setattr(own_successors, "launch_bound", launch)
    monkeypatch.setattr(EngineClient, "attach", lambda *_, **__: FakeClient())
    return launched


def made() -> OwnSuccessors:
    first: Any = FakeProcess()
    restarts = Restarts(3)
    config = engine_config({})
    log = Log("test")
    return OwnSuccessors(first, config, LogSettings(), restarts, watchdog_s=1.0, log=log)


def test_a_wake_takes_the_spare_process(launched: list[FakeProcess]) -> None:
    successors = made()
    successors.prepare()
    (spare,) = launched
    assert spare.is_spare
    assert not spare.has_begun
    asyncio.run(successors.wake())
    assert spare.has_begun
    assert not spare.has_ended
    asyncio.run(successors.end_spare())
    assert not spare.has_ended, "it is the engine now"
    asyncio.run(successors.wake())
    assert [one.is_spare for one in launched] == [True, False], "a spare serves once"


def test_a_spare_process_that_cannot_begin_is_replaced(launched: list[FakeProcess]) -> None:
    successors = made()
    successors.prepare()
    launched[0].can_begin = False
    asyncio.run(successors.wake())
    assert launched[0].has_ended, "its directory is removed"
    assert [one.has_begun for one in launched] == [False, True]


def test_a_server_that_ends_leaves_no_spare_process(launched: list[FakeProcess]) -> None:
    async def check() -> None:
        successors = made()
        await successors.end_spare()
        successors.prepare()
        await successors.end_spare()

    asyncio.run(check())
    assert launched[0].has_ended


def test_an_engine_without_sockets_is_ended_and_replaced(
    launched: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a spare's directory is removed, or no descriptor is left, at this very moment."""
    attach = EngineClient.attach
    monkeypatch.setattr(restarting, "_FIRST_S", 0.0)

    def refuse(process: FakeProcess, *_: object, **__: object) -> None:
        monkeypatch.setattr(EngineClient, "attach", attach)
        raise WorkerError("the sockets cannot be opened")

    monkeypatch.setattr(EngineClient, "attach", refuse)
    asyncio.run(made().next("it died"))
    assert [one.has_ended for one in launched] == [True, False]


def test_a_wake_needs_no_spare_process(
    launched: list[FakeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    successors = made()
    launch = own_successors.launch_bound

    def refuse(*_: object, **__: object) -> None:
        raise SettingError("no process is left")

    monkeypatch.setattr(own_successors, "launch_bound", refuse)
    successors.prepare()
    monkeypatch.setattr(own_successors, "launch_bound", launch)
    asyncio.run(successors.wake())
    assert [one.has_begun for one in launched] == [True]
