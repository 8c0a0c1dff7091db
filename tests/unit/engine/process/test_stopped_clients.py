"""Stopped clients: found by the states of their processes, after some looks that agree."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.process.stopped_clients import LOOK_S, LOOKS_TO_GO_ON, StoppedClients

PATIENCE_S = 60.0
PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SYSCALL = 16, 17, 24


class Rig:
    """States of made-up processes, and the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.clients = StoppedClients(lambda: self.now_s, folder)

    def say(self, process_id: int, state: str) -> None:
        (self.folder / str(process_id)).mkdir(exist_ok=True)
        path = self.folder / str(process_id) / "stat"
        path.write_text(f"{process_id} (quire (T) x) {state} 1 2 3")

    def look(self) -> list[tuple[int, bool]]:
        self.now_s += LOOK_S
        return self.clients.changes()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.clients.close()


def test_a_client_is_stopped_after_two_looks_and_goes_on_after_five(rig: Rig) -> None:
    for process_id in (11, 12):
        rig.say(process_id, "S")
    rig.clients.add(1, 11)
    rig.clients.add(2, 12)
    assert rig.look() == []
    rig.say(11, "T")
    assert rig.look() == []
    assert rig.look() == [(1, True)]
    assert rig.look() == []
    rig.say(11, "R")
    assert [rig.look() for _ in range(LOOKS_TO_GO_ON - 1)] == [[]] * (LOOKS_TO_GO_ON - 1)
    rig.say(11, "T")  # a moment is no return
    assert rig.look() == []
    rig.say(11, "R")
    assert [rig.look() for _ in range(LOOKS_TO_GO_ON)] == [*[[]] * 4, [(1, False)]]
    assert rig.look() == []


def test_a_moment_is_no_stop(rig: Rig) -> None:
    rig.say(11, "T")
    rig.clients.add(1, 11)
    for _ in range(3):
        rig.say(11, "T")
        assert rig.look() == []
        rig.say(11, "S")
        assert rig.look() == []


def test_it_looks_once_in_a_while(rig: Rig) -> None:
    rig.say(11, "T")
    rig.clients.add(1, 11)
    assert rig.look() == []
    rig.now_s += LOOK_S / 2
    assert rig.clients.changes() == []
    rig.now_s += LOOK_S / 2
    assert rig.clients.changes() == [(1, True)]


def test_clients_that_have_left_and_unknown_processes_are_not_looked_at(rig: Rig) -> None:
    rig.say(11, "T")
    rig.clients.add(1, 11)
    rig.clients.add(2, 999)
    rig.clients.remove(1)
    rig.clients.remove(3)
    assert [rig.look() for _ in range(3)] == [[], [], []]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_a_real_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    clients = StoppedClients(time.monotonic)
    clients.add(7, process.pid)

    def next_changes() -> list[tuple[int, bool]]:
        end_s = time.monotonic() + PATIENCE_S
        while not (found := clients.changes()):
            assert time.monotonic() < end_s, "never happened: a change"
            time.sleep(LOOK_S / 10)
        return found

    try:
        os.kill(process.pid, signal.SIGSTOP)
        assert next_changes() == [(7, True)]
        os.kill(process.pid, signal.SIGCONT)
        assert next_changes() == [(7, False)]
        os.kill(process.pid, signal.SIGSTOP)
        assert next_changes() == [(7, True)]
    finally:
        process.kill()
        process.wait()
    assert next_changes() == [(7, False)]
    clients.close()


def _ptrace(request: int, process_id: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, process_id, None, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace is Linux's")
def test_a_process_that_is_traced_counts_as_running(rig: Rig) -> None:
    """As under strace: each look finds it stopped by its tracer, at another system call."""
    program = "import os\nwhile True: os.getppid()"
    process = subprocess.Popen([sys.executable, "-c", program])
    clients = StoppedClients(lambda: rig.now_s)
    clients.add(7, process.pid)
    try:
        try:
            _ptrace(PTRACE_ATTACH, process.pid)
        except PermissionError:
            pytest.skip("this process may not trace its children")
        os.waitpid(process.pid, 0)
        for _ in range(20):
            _ptrace(PTRACE_SYSCALL, process.pid)
            os.waitpid(process.pid, 0)
            assert ") t " in Path(f"/proc/{process.pid}/stat").read_text()
            rig.now_s += LOOK_S
            assert clients.changes() == []
        _ptrace(PTRACE_DETACH, process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        found = []
        for _ in range(2):
            rig.now_s += LOOK_S
            found += clients.changes()
        assert found == [(7, True)]
    finally:
        process.kill()
        process.wait()
        clients.close()
