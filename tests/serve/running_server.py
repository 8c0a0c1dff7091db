"""A real `quire serve` in its own process, and clients that send it plain HTTP.

    with RunningServer(model_folder, "--max-num-seqs", "4") as server:
        answer = server.post("/v1/completions", {"prompt": "abc"})

Nothing here imports the package under test.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.serve import preloaded

GIVE_UP_S = 60.0
# By default an idle engine prefaults 1 GiB of KV cache: a quarter of the CPU time of a start.
NO_PREFAULT = ("--kv-touch-ahead", "0")
ROOT = Path(__file__).parents[2]


class RunningServer:
    """A server at a free loopback port; ready once constructed, unless wait is False.

    Its modules are preloaded (preloaded.py), except with `fresh`, which is the default without
    `wait` and for a `launcher`. environment: beside this process's. files: its limit of open files.
    launcher: words of Python that run a module several times, as torchrun does; the process is then
    the launcher's.
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        wait: bool = True,
        fresh: bool | None = None,
        environment: dict[str, str] | None = None,
        files: int | None = None,
        at: tuple[str, ...] = ("--port", "0"),
        launcher: tuple[str, ...] = (),
    ) -> None:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by kill)
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        words = ["serve", str(model), *at, *NO_PREFAULT, *flags]
        self.process: subprocess.Popen[bytes] | preloaded.Preloaded
        if fresh is None:
            fresh = not wait or launcher != ()
        if fresh:
            assert files is None, "the limit of files is that of preloaded processes"
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "quire", *words],
                stdout=self._out,
                stderr=self._err,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        else:
            self.process = preloaded.start(
                words, self._out, self._err, environment or {}, max_files=files
            )
        self.port = 0
        try:
            if "--port" in at:
                self.port = int(
                    self._eventually(r'\baddress(?:=|": ")https?://[^:]+:(\d+)', self.stderr)
                )
            if wait:
                self._eventually(r"ready in ([0-9.]+) s", self.stdout)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GIVE_UP_S)
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """The engine process: the server's only child."""
        (pid,) = children_of(self.process.pid)
        return pid

    def stdout(self) -> str:
        return written_in(self._out)

    def stderr(self) -> str:
        return written_in(self._err)

    def exit_code(self) -> int:
        """Return the exit code; fail instead of waiting forever."""
        return self.process.wait(GIVE_UP_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        self._err.close()

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, body) of one exchange on its own connection."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        try:
            connection.request(method, path, raw, headers)
            with connection.getresponse() as response:  # it owns a connection that ends with it
                found = {name.lower(): value for name, value in response.getheaders()}
                return response.status, found, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return (status, JSON) of a POST."""
        status, _, raw = self.request("POST", path, body)
        return status, json.loads(raw)

    def get(self, path: str) -> tuple[int, Any]:
        """Return (status, JSON) of a GET."""
        status, _, raw = self.request("GET", path)
        return status, json.loads(raw)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 without samples."""
        text = self.request("GET", "/metrics")[2].decode()
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fails with `what` after a long time."""
        start = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - start
            assert waited_s < GIVE_UP_S, f"never happened: {what}\n{self.stderr()[-3000:]}"
            time.sleep(min(0.005 + waited_s / 10, 0.05))  # asking for metrics costs 2 ms of CPU

    @contextmanager
    def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        receive_buffer_bytes: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[EventReader]:
        """Open a stream on a raw socket; leaving closes it, complete or not."""
        raw = json.dumps({**body, "stream": True}).encode()
        further = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{further}Content-Length: {len(raw)}\r\n\r\n"
        )
        with socket.socket() as connection:
            if receive_buffer_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            connection.settimeout(GIVE_UP_S)
            connection.connect(("127.0.0.1", self.port))
            connection.sendall(head.encode() + raw)
            reader = EventReader(connection)
            try:
                yield reader
            finally:
                reader.close()

    def _eventually(self, pattern: str, read: Callable[[], str]) -> str:
        deadline = time.monotonic() + GIVE_UP_S
        while (found := re.search(pattern, read())) is None:
            code = self.process.poll()
            assert code is None, f"ended with {code} before {pattern!r}: {self.stderr()}"
            assert time.monotonic() < deadline, f"never printed {pattern!r}: {self.stderr()}"
            time.sleep(0.01)
        return found[1]


class EventReader:
    """Iterate over the server-sent events of one response."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._response = http.client.HTTPResponse(connection)
        self._begun = False

    @property
    def status(self) -> int:
        self._begin()
        return self._response.status

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of each event; "[DONE]" as text. Ends with the response."""
        self._begin()
        for line in self._response:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    def next(self) -> Any:
        return next(iter(self))

    def read(self) -> bytes:
        """Return the rest of the body."""
        self._begin()
        return self._response.read()

    def close(self) -> None:
        """Close the connection, which the response object otherwise keeps open."""
        self._response.close()
        self.connection.close()

    def _begin(self) -> None:
        if not self._begun:
            self._response.begin()
            self._begun = True


def text_of(events: list[Any]) -> str:
    """Return the text of choice 0 of streamed completions or chats."""
    choices = [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for choice in choices
    )


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that run: not those just killed."""
    children = filter(alive, map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return [child for child in children if name_of(child) != preloaded.TEMPLATE_NAME]


def engines_of(server: RunningServer) -> list[int]:
    """Return the engines of a server that run."""
    return [child for child in children_of(server.process.pid) if is_engine(child)]


def is_engine(pid: int) -> bool:
    """Return whether a process is an engine, be it a copy of a template or a fresh interpreter."""
    if name_of(pid) == preloaded.NAMES[preloaded.ENGINE]:
        return True
    try:
        return preloaded.ENGINE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def name_of(pid: int) -> str:
    """Return a process's name; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def written_in(file: Any) -> str:
    """Return what a process has written to a file that it shares with this one."""
    # It writes at the shared offset, which `read` would move.
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")
