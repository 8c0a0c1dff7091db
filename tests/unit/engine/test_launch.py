"""What the engine's process is given: a folder whose sockets fit, and no keys."""

from __future__ import annotations

import io
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.engine.launch import EngineProcess


class Started:
    """A process that was never started, with what it would have got."""

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.settings = settings
        self.stdin = io.BytesIO()

    def wait(self, timeout_s: float | None = None) -> int:
        return 0


def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[EngineProcess, Started]:
    started: list[Started] = []

    def start(command: list[str], **settings: Any) -> Started:
        started.append(Started(command, **settings))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return EngineProcess.launch(EngineConfig()), started[0]


def test_the_key_of_the_environment_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    process, started = launched(monkeypatch)
    process.end(0)
    assert "QUIRE_API_KEY" not in started.settings["env"]
    assert started.settings["env"]["QUIRE_ISA"] == "avx2"


def test_sockets_do_not_lie_where_their_address_would_be_too_long(
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


def test_a_folder_that_cannot_be_written_to_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(SettingError, match="/nowhere"):
        EngineProcess.launch(EngineConfig())
