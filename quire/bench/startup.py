"""`quire bench startup`: from process start to ready, and to the first token.

Each start is a separate process, which gets one request over HTTP. The first one warms the page
cache, fills a pack cache if one is given, and is not counted. All starts get the same greedy
request; if the answers differ, nothing is reported. Uses the command line and HTTP only.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import IO, Any

from quire.base.errors import WorkerError
from quire.bench.report import result
from quire.obs.report import Progress

GIVE_UP_S = 300.0
# A server that was sent SIGTERM is killed after so long.
_END_S = 60.0
_ASKED = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "stream": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds from process start, and the greedy answer."""

    ready_s: float
    first_token_s: float
    text: str


def measure_startup(
    words: Sequence[str], *, starts: int, progress: Progress | None = None
) -> dict[str, object]:
    """Return the result. words: arguments of `quire serve` without the port. Raises WorkerError."""
    progress = progress or Progress()
    found: list[Start] = []
    for number in range(starts + 1):
        progress.say(f"start {number} of {starts}" if number else "a first start, not counted")
        found.append(one_start(words))
    progress.clear()
    counted = check_same(found)[1:]
    return result(
        "startup",
        {"starts": starts, "serve": list(words)},
        ready_s=spread([one.ready_s for one in counted]),
        first_token_s=spread([one.first_token_s for one in counted]),
    )


def startup_text(outcome: Mapping[str, Any]) -> str:
    """Return two lines: ready and first token."""
    return "\n".join(
        f"{name:<23}{outcome[key]['median']:.3f} s  "
        f"({outcome[key]['least']:.3f} to {outcome[key]['most']:.3f}, "
        f"{outcome['settings']['starts']} starts)"
        for name, key in (("ready to take requests", "ready_s"), ("first token", "first_token_s"))
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def check_same(starts: Sequence[Start]) -> Sequence[Start]:
    """Return the starts. Raises WorkerError where the answers differ."""
    answers = sorted({one.text for one in starts})
    if len(answers) != 1:
        raise WorkerError(f"starts answered the same request differently: {answers}")
    return starts


def one_start(words: Sequence[str]) -> Start:
    """Start a server, send one request, stop it. Raises WorkerError where it does not serve."""
    port = _free_port()
    command = [sys.executable, "-m", "quire", "serve", *words, "--port", str(port)]
    began_s = time.perf_counter()
    # A file, not a pipe: the server logs each request, and the pipe is not read while it starts.
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            ready_s = _until_ready(port, server, began_s)
            first_s, text = _first_token(port, began_s)
        except WorkerError as error:
            raise WorkerError(f"{error}: {_end(log)}") from error
        finally:
            _stop(server)
        if server.returncode != 0:
            raise WorkerError(f"the server ended with exit code {server.returncode}: {_end(log)}")
    return Start(ready_s=ready_s, first_token_s=first_s, text=text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_ready(port: int, server: subprocess.Popen[bytes], began_s: float) -> float:
    while time.perf_counter() - began_s < GIVE_UP_S:
        if server.poll() is not None:
            raise WorkerError("the server ended before it was ready")
        with suppress(OSError), closing(_connection(port)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return time.perf_counter() - began_s
        time.sleep(0.002)
    raise WorkerError(f"the server is not ready after {GIVE_UP_S:.0f} s")


def _first_token(port: int, began_s: float) -> tuple[float, str]:
    with closing(_connection(port)) as connection:
        connection.request("GET", "/v1/models")
        name = json.load(connection.getresponse())["data"][0]["id"]
        body = json.dumps({"model": name, **_ASKED})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        first_s, text = 0.0, ""
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - began_s
            choices = json.loads(line[6:]).get("choices") or ()
            text += choices[0]["text"] if choices else ""
    if not first_s:
        raise WorkerError(f"no token came: HTTP {response.status}")
    return first_s, text


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:  # it hangs; its exit code is reported
        server.kill()
        server.wait()


def _end(log: IO[bytes]) -> str:
    """Return the error that ended the server, else the end of its log."""
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    errors = [line for line in text.splitlines() if line.startswith("quire serve: ")]
    return "\n".join(errors)[-500:] or text[-500:] or "it said nothing"
