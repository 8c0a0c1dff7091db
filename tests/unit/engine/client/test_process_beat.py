"""Beats of a process: they come while the interpreter lock is held, and stop where it stops."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire._native import MemoryBeat
from quire.base.clock import Clock
from quire.config.groups import EngineConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import SharedEngine
from quire.engine.client.process_beat import ProcessBeat


def _until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_times_are_those_of_the_clock_and_come_while_the_interpreter_lock_is_held() -> None:
    beat = ProcessBeat()
    assert beat.time_ms == 0
    began_ms = Clock().now_ms()
    writer = MemoryBeat(beat.file, 0.001)
    beat.started()
    time.sleep(0.02)
    assert beat.time_ms == 0, "it does not run"
    writer.run(True)
    first_ms = beat.time_ms
    assert began_ms - 1 <= first_ms <= Clock().now_ms()
    ctypes.PyDLL(None).usleep(200_000)  # such calls keep the lock
    assert beat.time_ms - first_ms > 100
    writer.run(True)
    writer.run(False)
    time.sleep(0.02)
    assert beat.time_ms == 0
    writer.run(True)
    assert beat.time_ms >= first_ms
    del writer
    last_ms = beat.time_ms
    time.sleep(0.05)
    assert beat.time_ms == last_ms, "its thread has ended"


def test_no_memory_is_an_error() -> None:
    with pytest.raises(Exception, match="beats"):
        MemoryBeat(-1, 0.1)


def test_a_stopped_process_writes_none_and_one_with_the_lock_held_does() -> None:
    """The lock is held for good: Python code of the process sends nothing any more."""
    beat = ProcessBeat()
    script = (
        "import ctypes, sys\n"
        "from quire._native import MemoryBeat\n"
        "beat = MemoryBeat(int(sys.argv[1]), 0.01)\n"
        "beat.run(True)\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    words = [sys.executable, "-c", script, str(beat.file)]
    process = subprocess.Popen(words, pass_fds=[beat.file])
    try:
        beat.started()
        _until(lambda: beat.time_ms > 0)
        first_ms = beat.time_ms
        _until(lambda: beat.time_ms > first_ms + 100)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        last_ms = beat.time_ms
        time.sleep(0.2)
        assert beat.time_ms == last_ms
        process.send_signal(signal.SIGCONT)
        _until(lambda: beat.time_ms > last_ms)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_shared", [False, True])
def test_health_has_the_age_of_the_newest_beat_while_there_is_work(is_shared: bool) -> None:
    process: Any = SimpleNamespace(beat_ms=0)
    if is_shared:
        process = SharedEngine(folder=None, client=1)  # type: ignore[arg-type]
    link: Any = None
    client = EngineClient(link, EngineConfig(), process=process)
    if is_shared:
        client._num_given_up = 1
        assert client.health().no_beat_ms == 0
        return
    assert client.health().no_beat_ms == 0, "none has come"
    process.beat_ms = Clock().now_ms() - 5000
    assert client.health().no_beat_ms == 0, "nothing is to be computed"
    client._num_given_up = 1
    assert 5000 <= client.health().no_beat_ms < 60_000
    process.beat_ms = Clock().now_ms() + 1
    assert client.health().no_beat_ms == 1
