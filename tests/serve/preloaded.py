"""Start `quire serve` by forking a process that has already imported what a server imports.

    process = start(["serve", "MODEL", "--port", "0"], out, err)   # used like a subprocess.Popen

Nearly all of a start's CPU time is imports, and the suite starts dozens of servers: here the
imports happen once in each process of tests. Everything after them is as in a start of its own:
the server's process and its engine, their arguments, environment, descriptors, signals and exit
codes. The engine is forked as well, before the server has run a line, and waits until the server
starts it; any further child (a restarted engine, a rank) is a fresh interpreter.

`shared_server`, and every start that is about loading, environment variables, limits or several API
processes, has a fresh interpreter (see running_server.py). Always holds: the preloading process has
one thread and has opened nothing, so a fork of it is a fresh start. It ends with the process that
uses it.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
GIVE_UP_S = 60.0
ENGINE = "quire.engine.process.main"
# What a server and its engine import; the rest comes with these.
MODULES = (
    "quire.cli.main",
    "quire.cli.serve",
    "quire.api.server",
    "quire.engine.client.engine_client",
    ENGINE,
)
_MAX_BYTES = 1 << 17
_MAX_DESCRIPTORS = 16
_ABOVE = 200  # descriptors that a process receives are first moved beyond those it needs


class Preloaded:
    """A started process: what the tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, loader: Loader) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loader = loader
        self._pidfd = os.pidfd_open(pid)  # it is not reaped before `wait` asks for it

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None and _is_readable(self._pidfd, 0):
            self.returncode = self._loader.reap(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises TimeoutExpired."""
        if self.returncode is None and not _is_readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("quire serve", timeout or 0.0)
        code = self.poll()
        assert code is not None, "its descriptor is readable"
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))


class Loader:
    """The preloading process, as seen by the tests."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.preloaded", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def start(self, words: Sequence[str], out: IO[str], err: IO[str]) -> Preloaded:
        """Run the command with these words; its output goes to these files."""
        order = {"start": list(words), "environment": dict(os.environ)}
        socket.send_fds(self._orders, [json.dumps(order).encode()], [out.fileno(), err.fileno()])
        return Preloaded(self._answer(), self)

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        self._orders.send(json.dumps({"reap": pid}).encode())
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        self.process.wait(GIVE_UP_S)

    def _answer(self) -> int:
        raw = self._orders.recv(_MAX_BYTES)
        assert raw, f"the preloading process has ended: {self.process.wait()}"
        return int(raw)


@lru_cache(maxsize=1)
def _loader() -> Loader:
    loader = Loader()
    atexit.register(loader.close)
    return loader


def start(words: Sequence[str], out: IO[str], err: IO[str]) -> Preloaded:
    """Start `quire` with these words in a fork of this process's loader."""
    return _loader().start(words, out, err)


# ---- the preloading process, and its forks


def main() -> int:
    """Import, then fork a server for each order; in a server, run it."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all modules
    while True:
        raw, descriptors, _, _ = socket.recv_fds(orders, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not raw:
            return 0
        order: dict[str, Any] = json.loads(raw)
        if "reap" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                orders.close()
                return _serve(order["start"], order["environment"], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        orders.send(str(answer).encode())


def _serve(words: list[str], environment: Mapping[str, str], descriptors: list[int]) -> int:
    """Be the server of an order; or its engine, which it forks first."""
    _become(environment, dict(zip((1, 2), descriptors, strict=True)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        return _wait_for_start(ENGINE, theirs)
    theirs.close()
    _start_from([_Waiting(ENGINE, pid, ours)])
    sys.argv = ["quire", *words]
    code: int = import_module("quire.cli.main").main(words)
    return code


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A child of the server that waits to be started."""

    module: str
    pid: int
    orders: socket.socket


def _start_from(waiting: list[_Waiting]) -> None:
    """Let `subprocess` start processes of ours from these, while there are any."""
    command: list[str] = import_module("quire.base.child_process").command_of("")[:-1]
    start_fresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, words: Any, *others: Any) -> None:
        words = list(words)
        module = words[len(command)] if words[: len(command)] == command else ""
        found = next((one for one in waiting if one.module == module), None)
        if found is None:
            start_fresh(self, words, *others)
            return
        waiting.remove(found)
        pass_fds, environment = others[3], others[5]
        read_0, write_0, read_1, write_1, read_2, write_2 = others[9:15]
        numbers = {0: read_0, 1: write_1, 2: write_2} | {fd: fd for fd in pass_fds}
        numbers = {number: fd for number, fd in numbers.items() if fd != -1}
        order = {
            "words": words[len(command) + 1 :],
            "environment": dict(os.environ if environment is None else environment),
            "numbers": list(numbers),
        }
        with found.orders:
            socket.send_fds(found.orders, [json.dumps(order).encode()], list(numbers.values()))
        self.pid = found.pid
        self._child_created = True
        self._close_pipe_fds(read_0, write_0, read_1, write_1, read_2, write_2)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _wait_for_start(module: str, orders: socket.socket) -> int:
    """Be a child of the server, once it starts this one."""
    raw, descriptors, _, _ = socket.recv_fds(orders, _MAX_BYTES, _MAX_DESCRIPTORS)
    orders.close()
    if not raw:  # the server has ended without it
        return 0
    order = json.loads(raw)
    _become(order["environment"], dict(zip(order["numbers"], descriptors, strict=True)))
    sys.argv = ["-c", *order["words"]]
    code: int = import_module(module).main()
    return code


def _become(environment: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
    """Take an environment, and received descriptors under other numbers."""
    os.environ.clear()
    os.environ.update(environment)
    moved = {}
    for number, received in descriptors.items():
        moved[number] = fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        os.close(received)
    for number, received in moved.items():
        os.dup2(received, number)
        os.close(received)


if __name__ == "__main__":
    sys.exit(main())
