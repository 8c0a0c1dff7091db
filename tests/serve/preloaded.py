"""Start `quire` commands by forking a process that has already imported what a server imports.

    process = start(["serve", "MODEL", "--port", "0"], out, err)   # used like a subprocess.Popen

Nearly all of a start's CPU time is imports, and the suite starts dozens of servers: here the
imports happen once in each process of tests. Everything after them is as in a start of its own:
the command's process and its children, their arguments, environment, descriptors, parents, signals
and exit codes. Children of a server (engines, API workers, ranks) are copies of a template, which
is forked before the server has run a line. Within `forked_children()` the engines, ranks and
commands (`python -m quire`) that this process itself starts are forked as well.

Every start that is about loading or what is read on import has a fresh interpreter (see
running_server.py). Always holds: the preloading process and the templates have one thread and have
opened nothing, so a fork of them is a fresh start. They end with the process that uses them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
GIVE_UP_S = 60.0
ENGINE = "quire.engine.process.main"
# Names of processes, as the system shows them; a fresh interpreter keeps its own.
NAMES = {
    ENGINE: "quire-engine",
    "quire.api.workers.worker": "quire-worker",
    "quire.ranks.main": "quire-rank",
    "tests.connected_ranks": "quire-rank",
}
TEMPLATE_NAME = "quire-template"
# Commands that are started by `python -m` and their arguments, and the modules of their `main`.
COMMANDS = {"quire": "quire.cli.main", "bench.soak.server": "bench.soak.server"}
# What a server and its children import; the rest comes with these.
MODULES = (
    "quire.cli.main",
    "quire.cli.serve",
    "quire.api.server",
    "quire.api.workers.supervisor",
    "quire.engine.client.engine_client",
    "quire.router.server",
    "quire.api.served_engine",
    "quire.config.config_file",
    "quire.config.environment",
    "quire.obs.vllm_metrics",
    "encodings.idna",
    "uvicorn.lifespan.off",
    *NAMES,
)
# Words that give an engine children of its own.
RANK_FLAGS = frozenset({"-tp", "-pp", "--tensor-parallel-size", "--pipeline-parallel-size"})
_MAX_BYTES = 1 << 17
_MAX_DESCRIPTORS = 16
_SET_NAME, _SET_CHILD_SUBREAPER = 15, 36  # of prctl


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
        self._using = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.preloaded", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def start(
        self,
        words: Sequence[str],
        files: Sequence[int],
        environment: Mapping[str, str],
        max_files: int | None = None,
        constants: Mapping[str, int] = MappingProxyType({}),
    ) -> Preloaded:
        """See `start`. files: its output, errors, and input if any."""
        order = {
            "start": list(words),
            "environment": {**os.environ, **environment},
            "max_files": max_files,
            "constants": dict(constants),
        }
        return Preloaded(self._answer(order, files), self)

    def copy(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Start a module in a copy that is a child of this process; return its process id."""
        own = [number for number in (1, 2) if number not in order["numbers"]]
        order = {**order, "numbers": [*order["numbers"], *own]}
        _prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            return self._answer(order, [*descriptors, *own])
        finally:
            _prctl(_SET_CHILD_SUBREAPER, 0)

    def reap(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        return self._answer({"reap": pid}, ())

    def close(self) -> None:
        """End the process."""
        self._orders.close()
        self.process.wait(GIVE_UP_S)

    def _answer(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._using:
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
            raw = self._orders.recv(_MAX_BYTES)
        assert raw, f"the preloading process has ended: {self.process.wait()}"
        return int(raw)


@lru_cache(maxsize=1)
def _loader() -> Loader:
    loader = Loader()
    atexit.register(loader.close)
    return loader


def start(
    words: Sequence[str],
    out: IO[Any] | int,
    err: IO[Any] | int,
    environment: Mapping[str, str] = MappingProxyType({}),
    given: IO[Any] | None = None,
    max_files: int | None = None,
    constants: Mapping[str, int] = MappingProxyType({}),
) -> Preloaded:
    """Start `quire` with these words in a fork of this process's loader.

    out, err: files, or descriptors. environment: beside this process's. given: its input.
    max_files: its limit of open files. constants: of modules, by their full names, in the process
    and its children.
    """
    files = [
        one if isinstance(one, int) else one.fileno()
        for one in (out, err, given)
        if one is not None
    ]
    return _loader().start(words, files, environment, max_files, constants)


def run(*words: str, given: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. given: its input. environment: beside this process's."""
    with ExitStack() as files:
        out, err, read = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        read.write(given)
        read.seek(0)
        code = start(words, out, err, environment, read).wait(GIVE_UP_S)
        texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
    return subprocess.CompletedProcess(words, code, *texts)


@contextmanager
def forked_children() -> Iterator[None]:
    """Fork the engines, ranks and commands that this process starts meanwhile."""
    start_fresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    _start_from(_loader().copy)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = start_fresh  # type: ignore[attr-defined]


# ---- the preloading process, and its forks


def main() -> int:
    """Import, then fork a process for each order; in a fork, run the command."""
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
            answer = os.fork() if "start" in order else _fork_orphan()
            if answer == 0:
                orders.close()
                if "start" in order:
                    return _be_started(order, descriptors)
                return _be_copy(order, descriptors, has_ranks=False)
            for descriptor in descriptors:
                os.close(descriptor)
        orders.send(str(answer).encode())


def _be_started(order: dict[str, Any], descriptors: list[int]) -> int:
    """Be the command of an order."""
    _become(order["environment"], dict(zip((1, 2, 0), descriptors, strict=False)))
    if order["max_files"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (order["max_files"],) * 2)
    for name, value in order["constants"].items():
        module, _, constant = name.rpartition(".")
        assert hasattr(import_module(module), constant), name
        setattr(import_module(module), constant, value)
    return _be_command("quire", order["start"])


def _be_command(command: str, words: list[str]) -> int:
    """Be a command with these arguments."""
    if "--api-processes" in words and words[words.index("--api-processes") + 1] != "1":
        _count_in_files()
    if command != "quire" or words[0] == "serve":
        _start_from(_Template(has_ranks=not RANK_FLAGS.isdisjoint(words)).start)
    sys.argv = [command, *words]
    code: int = import_module(COMMANDS[command]).main()
    return code


class _Template:
    """A child of this process that has run nothing, and is copied for each further child.

    A copy is a child of this process, which adopts orphans below it: the template forks a process
    that forks the copy and ends.
    """

    def __init__(self, *, has_ranks: bool) -> None:
        _prctl(_SET_CHILD_SUBREAPER, 1)
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._using = threading.Lock()
        if os.fork() == 0:
            self._orders.close()
            _end(_copy_on_order(theirs, has_ranks=has_ranks))
        theirs.close()

    def start(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Start a copy; return its process id."""
        with self._using:
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
            return int(self._orders.recv(_MAX_BYTES))


def _copy_on_order(orders: socket.socket, *, has_ranks: bool) -> int:
    """Be a template until the process that uses it ends; in a copy, run a module."""
    _prctl(_SET_NAME, ctypes.c_char_p(TEMPLATE_NAME.encode()))
    while True:
        raw, descriptors, _, _ = socket.recv_fds(orders, _MAX_BYTES, _MAX_DESCRIPTORS)
        if not raw:
            return 0
        copy = _fork_orphan()
        if copy == 0:
            orders.close()
            return _be_copy(json.loads(raw), descriptors, has_ranks=has_ranks)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(copy).encode())


def _fork_orphan() -> int:
    """Fork a process that is a child of the next one above that adopts orphans.

    Return its id, and 0 in the process itself.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        copy = os.fork()
        if copy:
            os.write(writing, str(copy).encode())
            os._exit(0)
    else:
        os.waitpid(between, 0)  # from here on the copy has its parent
        copy = int(os.read(reading, 64))
    os.close(reading)
    os.close(writing)
    return copy


def _be_copy(order: dict[str, Any], descriptors: list[int], *, has_ranks: bool) -> int:
    _become(order["environment"], dict(zip(order["numbers"], descriptors, strict=True)))
    module = order["module"]
    if module in COMMANDS:
        return _be_command(module, order["words"])
    _prctl(_SET_NAME, ctypes.c_char_p(NAMES[module].encode()))
    if has_ranks and module == ENGINE:
        _start_from(_Template(has_ranks=False).start)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _count_in_files()
    sys.argv = ["-c", *order["words"]]
    code: int = import_module(module).main()
    return code


def _start_from(start_copy: Callable[[dict[str, Any], list[int]], int]) -> None:
    """Let `subprocess` start processes of ours by this function."""
    ours: list[str] = import_module("quire.base.child_process").command_of("")[:-1]
    start_fresh = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, words: Any, *others: Any) -> None:
        words = list(words)
        at = len(ours) if words[: len(ours)] == ours else 2
        is_known = words[at : at + 1] and words[at] in (NAMES if at > 2 else COMMANDS)
        if not is_known or (at == 2 and words[:2] != [sys.executable, "-m"]):
            start_fresh(self, words, *others)
            return
        pass_fds, environment = others[3], others[5]
        read_0, write_0, read_1, write_1, read_2, write_2 = others[9:15]
        numbers = {0: read_0, 1: write_1, 2: write_2} | {fd: fd for fd in pass_fds}
        numbers = {number: fd for number, fd in numbers.items() if fd != -1}
        order = {
            "module": words[at],
            "words": words[at + 1 :],
            "environment": dict(os.environ if environment is None else environment),
            "numbers": list(numbers),
        }
        self.pid = start_copy(order, list(numbers.values()))
        self._child_created = True
        self._close_pipe_fds(read_0, write_0, read_1, write_1, read_2, write_2)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _count_in_files() -> None:
    """Choose the mode of prometheus_client that quire.obs.shared chooses before the import."""
    values = import_module("prometheus_client.values")
    values.ValueClass = values.MultiProcessValue()


def _prctl(option: int, value: Any) -> None:
    failed = ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    assert not failed, os.strerror(ctypes.get_errno())


def _become(environment: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
    """Take an environment, and received descriptors under other numbers."""
    os.environ.clear()
    os.environ.update(environment)
    moved, above = {}, max(descriptors) + 1  # first beyond those that it needs
    for number, received in descriptors.items():
        moved[number] = fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, above)
        os.close(received)
    for number, received in moved.items():
        os.dup2(received, number)
        os.close(received)
    # The files of the preloading process know what they were opened for, which was /dev/null.
    sys.__stdin__ = sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.__stderr__ = sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


def _end(code: int) -> NoReturn:
    """End this process without taking its modules apart, which takes as long as a start."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
