"""run_engine: errors are sent to the client, and the log keeps their origin."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import CapacityError
from quire.config.groups import EngineConfig
from quire.engine.client.thread_link import QueueInbox
from quire.engine.process import engine_host as host
from quire.engine.process.engine_host import run_engine
from quire.engine.process.messages import Failed, FromEngine


def _failed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[Failed, list[Any]]:
    """Return what client and log receive if the assembly raises `error`."""

    def assemble(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(host, "assemble", assemble)
    sent: list[FromEngine] = []
    reports: list[Any] = []

    def report(what: str, **fields: object) -> None:
        reports.append((what, fields))

    assert not run_engine(EngineConfig(), QueueInbox(), sent.append, report=report)
    last = sent[-1]
    assert isinstance(last, Failed)
    return last, reports


def test_an_unexpected_error_leaves_its_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, reports = _failed(KeyError(7), monkeypatch)
    assert failed.fault.message == "KeyError: 7"
    ((what, fields),) = reports
    assert what == "the engine failed"
    assert fields["error"] == "KeyError: 7"
    assert "test_engine_host.py" in fields["traceback"]


def test_memory_that_is_not_there_is_explained_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, reports = _failed(MemoryError(), monkeypatch)
    assert failed.fault.kind == "CapacityError"
    assert failed.fault.message.startswith("memory could not be allocated")
    assert not reports


def test_an_expected_error_is_left_to_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed, reports = _failed(CapacityError("too small\n- by a lot"), monkeypatch)
    assert failed.fault.message == "too small\n- by a lot"
    assert reports == []
