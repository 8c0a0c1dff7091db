"""The servers under test, each a child process, and the processor time they have used.

A server's processor time is that of its process and all descendants, user and system, from /proc.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_READY_S = 60.0
_TICK_HZ = os.sysconf("SC_CLK_TCK")


class Child:
    """One server, ready after construction. words: the arguments after `python -m`."""

    # In its output once it is ready.
    READY = "ready in "

    def __init__(self, *words: str) -> None:
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=self._out,
            stderr=self._out,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.pid = self._process.pid
        try:
            self._await(self.READY)
            self.port = int(re.findall(r"(?:address=)?http://[0-9.]+:(\d+)", self.output())[0])
        except BaseException:
            self.close()
            raise

    def output(self) -> str:
        """Return its output so far."""
        return os.pread(self._out.fileno(), 1 << 20, 0).decode(errors="replace")

    def drive(self, path: str, body: object, *, streams: int, rounds: int) -> dict[str, Any]:
        """Load it by a client in another process; return the counts and the time."""
        asked = Asked(self.port, path, body, streams, rounds)
        return drive(self.pid, asked, output=self.output)

    def close(self) -> None:
        """Stop it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
                break
        self._out.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await(self, words: str) -> None:
        end_s = time.monotonic() + _READY_S
        while words not in self.output():
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"a server did not start: {self.output()[-600:]}")
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Asked:
    """The client's parameters."""

    port: int
    path: str
    body: object
    streams: int
    rounds: int


def drive(pid: int, asked: Asked, *, output: Callable[[], str]) -> dict[str, Any]:
    """Load the server of process `pid` from a client process; return its counts and the time.

    `output`: the output of the server so far.
    """
    before = cpu_s(pid)
    done = subprocess.run(
        [sys.executable, "-m", "bench.frontend.client"],
        input=json.dumps({"host": "127.0.0.1", **asdict(asked)}),
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    after = cpu_s(pid)
    if done.returncode:
        raise SystemExit(f"the client gave up: {done.stderr[-600:]}\n{output()[-600:]}")
    came: dict[str, Any] = json.loads(done.stdout)
    came["cpu_s"] = [used - before.get(number, 0.0) for number, used in after.items()]
    return came


def cpu_s(pid: int) -> dict[int, float]:
    """Return processor time so far by process, of the server and its descendants."""
    found, waiting = {}, [pid]
    while waiting:
        number = waiting.pop(0)
        with suppress(OSError):  # the process has ended
            found[number] = cpu_s_of(number)
            for task in Path(f"/proc/{number}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def cpu_s_of(pid: int) -> float:
    """Return the processor time of one process so far. Raises OSError where it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_HZ
