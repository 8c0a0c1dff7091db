"""EngineThread: it ends when it is asked to, and one that hangs is named."""

from __future__ import annotations

import threading

import pytest

from quire.config.groups import EngineConfig
from quire.engine.client import thread_link
from quire.engine.client.thread_link import EngineThread


@pytest.mark.parametrize("hangs", [False, True])
def test_an_engine_that_hangs_at_its_end_is_left_behind_and_named(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = threading.Event()

    def run_engine(config: object, inbox: thread_link.QueueInbox, *_: object, **__: object) -> None:
        inbox.take(None)
        if hangs:
            goes_on.wait()

    monkeypatch.setattr(thread_link, "run_engine", run_engine)
    monkeypatch.setattr(thread_link, "_END_S", 0.2 if hangs else 60.0)
    has_ended = threading.Event()
    engine = EngineThread(EngineConfig(), lambda message: None, on_end=has_ended.set)
    assert engine.end() != hangs
    assert ("is left behind: it has not ended" in capsys.readouterr().err) == hangs
    goes_on.set()
    assert has_ended.wait(60.0)
