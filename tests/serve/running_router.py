"""A real `quire route` in its own process, in front of running servers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.serve import preloaded
from tests.serve.running_server import GIVE_UP_S, written_in


class RunningRouter:
    """A router at a loopback port, by default a free one; ready once constructed."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        reading, writing = os.pipe()
        self.process = preloaded.start(
            ["route", *arguments, "--port", str(port)], writing, self._err
        )
        os.close(writing)
        self._out = open(reading, encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        line = self._out.readline()
        found = re.search(r":(\d+),", line)
        assert found is not None, self.stderr()
        self.port = int(found[1])

    def __enter__(self) -> RunningRouter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(GIVE_UP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._out.close()
        self._err.close()

    def stderr(self) -> str:
        """Return the log so far."""
        return written_in(self._err)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Return status and body of one exchange."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        try:
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, {"content-type": "application/json"})
            with connection.getresponse() as response:  # it owns a connection that ends with it
                return response.status, response.read()
        finally:
            connection.close()

    def lines(self, method: str, path: str, body: Any) -> Iterator[bytes]:
        """Yield the lines of a streamed answer as they come. Raises AssertionError if refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            with connection.getresponse() as response:
                assert response.status == 200, response.read()
                yield from response
        finally:
            connection.close()

    def health(self) -> Any:
        """Return the body of /health."""
        return json.loads(self.request("GET", "/health")[1])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = self.request("GET", "/metrics")[1].decode()
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; fails with `what` after a long time."""
        start = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - start
            assert waited_s < GIVE_UP_S, f"never happened: {what}\n{self.stderr()[-3000:]}"
            time.sleep(0.01)
