"""The log of a whole server: it never blocks, and under JSON logging each line is JSON."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve import preloaded
from tests.serve.running_server import GIVE_UP_S, NO_PREFAULT, RunningServer
from tests.serve.serve_command import serve, serve_in_process
from tests.serve.unix_connection import UnixConnection

# A queue of fewer lines than usual, and requests that log more lines than it holds.
QUEUE, NUM_REQUESTS = {"quire.base.log_sink.MAX_QUEUED_LINES": 100}, 120
COMPLETIONS = "/v1/completions"


def full_pipe() -> tuple[int, int]:
    """Return a pipe without room for a single byte."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 65536)
    except BlockingIOError:
        pass
    try:
        while True:
            os.write(write, b"x")
    except BlockingIOError:
        os.set_blocking(write, True)
    return read, write


class Caller:
    """Consecutive requests on one connection; waits until the server listens."""

    def __init__(self, path: Path) -> None:
        self._connection = UnixConnection(path)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        raw = None if body is None else json.dumps(body)
        self._connection.request(method, path, raw)
        with self._connection.getresponse() as response:
            return response.status, response.read()

    def until_ready(self, process: preloaded.Preloaded) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline, "never ready"
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except (ConnectionError, FileNotFoundError, http.client.HTTPException):
                self._connection.close()
            time.sleep(0.02)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_full_unread_pipe_blocks_nothing(tiny: Path, tmp_path: Path, num_processes: int) -> None:
    path = tmp_path / "quire.sock"
    read, write = full_pipe()
    flags = ["--uds", str(path), "--threads", "1", "--log-level", "debug", *NO_PREFAULT]
    words = ["serve", str(tiny), *flags, "--api-processes", str(num_processes)]
    process = preloaded.start(words, write, write, constants=QUEUE)
    os.close(write)
    came = bytearray()
    reader = threading.Thread(target=lambda: _read_all(read, came), daemon=True)
    caller = Caller(path)
    try:
        caller.until_ready(process)
        for _ in range(NUM_REQUESTS):  # on one connection, so of one process
            assert caller.ask("GET", "/health")[0] == 200
        assert caller.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
        metrics = caller.ask("GET", "/metrics")[1]
        dropped = re.search(rb"^quire_log_lines_dropped_total (\S+)$", metrics, re.MULTILINE)
        assert dropped is not None
        assert float(dropped[1]) > 0

        reader.start()
        deadline = time.monotonic() + GIVE_UP_S
        while not re.search(rb"log lines were dropped count=[1-9]", came):
            assert time.monotonic() < deadline, "the dropped lines were never reported"
            caller.ask("GET", "/health")
            time.sleep(0.01)
        assert re.search(rb" debug server( \d)?: request .*route=/health", came)  # a polled route
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0
    finally:
        caller.close()
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join(GIVE_UP_S)
        os.close(read)


def test_sigterm_ends_a_server_with_an_unread_log(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    read, write = full_pipe()
    words = ["serve", str(tiny), "--uds", str(path), *NO_PREFAULT]
    process = preloaded.start(words, write, write)
    caller = Caller(path)
    try:
        caller.until_ready(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GIVE_UP_S) == 0
    finally:
        caller.close()
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)


def _read_all(read: int, came: bytearray) -> None:
    while piece := os.read(read, 65536):
        came += piece


def lines_of(text: str) -> list[dict[str, Any]]:
    """Return the lines, each checked to be a JSON object with the common fields."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert list(line)[:4] == ["time", "level", "component", "event"]
    return lines


@pytest.mark.parametrize(
    ("flags", "num_processes"), [(("--log-format", "json"), "2"), (("--access-log", "json"), "1")]
)
def test_under_json_logging_every_line_is_json(
    tiny: Path, flags: tuple[str, ...], num_processes: str
) -> None:
    flags = (*flags, "--threads", "1", "--api-processes", num_processes)
    with RunningServer(tiny, *flags) as server:
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=GIVE_UP_S) as connection:
            connection.sendall(b"not HTTP\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        lines = lines_of(server.stderr())
    assert {"loading", "ready", "request", "stopped"} <= {line["event"] for line in lines}
    assert "uvicorn.error" in {line["component"] for line in lines}


def test_a_failed_start_is_json_under_json_logging(tmp_path: Path) -> None:
    done = serve(str(tmp_path), "--port", "0", "--log-format", "json")
    assert done.returncode == 2
    last = lines_of(done.stderr)[-1]
    assert last["level"] == "error"
    assert "config.json" in last["event"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--bogus", "1"), "unknown arguments: --bogus"),
        (("--max-num-seqs", "many"), "many"),
        (("--port", "0", "--uds", "/nowhere/x"), "both given"),
    ],
)
@pytest.mark.parametrize("form", [("--log-format", "json"), ("--access-log=json",)])
def test_an_error_in_the_flags_is_json_under_json_logging(
    words: tuple[str, ...], found: str, form: tuple[str, ...]
) -> None:
    done = serve_in_process(*form, *words)
    assert done.returncode == 2
    lines = lines_of(done.stderr)
    assert found in lines[0]["event"]
    assert {line["level"] for line in lines} == {"error"}


def test_lines_below_the_level_are_left_out(tiny: Path) -> None:
    read, write = os.pipe()
    words = ["serve", str(tiny), "--port", "0", *NO_PREFAULT, "--log-level", "error"]
    with open(read, "rb") as stdout, tempfile.TemporaryFile() as stderr:
        process = preloaded.start(words, write, stderr)
        os.close(write)
        try:
            while not stdout.readline().startswith(b"ready in"):
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(GIVE_UP_S) == 0
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        assert stderr.read() == b""
