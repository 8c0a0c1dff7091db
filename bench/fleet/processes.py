"""The processes of a fleet: replicas that can be killed, stopped and started again, and a router.

A replica keeps its port, so that it comes back under its address. Knows nothing of requests.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from bench.frontend.servers import REPOSITORY, cpu_s
from bench.peers.places import environment_python, is_installed

_READY_S = 120.0
_END_S = 20.0
# A router that is busy with a thousand streams may be late with an answer.
_ANSWER_S, _NUM_TRIES = 30.0, 4
_MAX_LOG_BYTES = 1 << 26
# Probes as often as the router's; its own defaults are 30 s and three failures.
_SMG_FLAGS = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "2"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--log-level", "error"),
)
# Usually a gateway has processors of its own; here its replicas and the clients use the same.
GATEWAY_NICE = -5
_FLAGS = (
    *("--threads", "1", "--kv-touch-ahead", "0"),
    *("--restart-engine", "--restart-limit", "1000", "--watchdog-seconds", "5"),
)


class Replica:
    """One server of the built-in model at `port`."""

    def __init__(self, port: int, log: Path, max_streams: int) -> None:
        self.port = port
        self._log = log
        # Any replica may have to take all streams; one that continues should not wait for a slot.
        self._words = (
            *("--port", str(port), "--max-num-seqs", str(max_streams)),
            *("--max-queued-requests", str(2 * max_streams), *_FLAGS),
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server; does not wait for it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quire", "serve", "", *self._words],
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )

    @property
    def is_running(self) -> bool:
        """Whether its process runs, stopped or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether /health answers 200."""
        return bool(self.state(5.0)["available"])

    def state(self, limit_s: float) -> dict[str, Any]:
        """Return whether it takes requests, and how many are open, by its /health."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = json.loads(response.read())
            return {"available": response.status == 200, "open": body.get("pending", 0)}
        except (OSError, http.client.HTTPException, ValueError):
            return {"available": False, "open": 0}
        finally:
            connection.close()

    def signal(self, number: int) -> None:
        """Send a signal to the server's process."""
        if self._process is not None:
            self._process.send_signal(number)

    def signal_engine(self, number: int) -> None:
        """Send a signal to the engine process, which the server starts again."""
        if self._process is None:
            return
        pid = self._process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), number)

    def wait(self, timeout_s: float = _END_S) -> None:
        """Wait for its end; kill it where it does not come."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it, whatever its state."""
        if self.is_running:
            self.signal(signal.SIGKILL)
        self.wait()


class _Closing:
    """Closed where its block ends."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what was started."""
        raise NotImplementedError


class Replicas(_Closing):
    """`count` replicas, ready, and the file that names them."""

    def __init__(self, count: int, folder: Path, *, max_streams: int) -> None:
        self.ports = _free_ports(count)
        self.all = [Replica(port, folder / f"{port}.log", max_streams) for port in self.ports]
        self.file = folder / "replicas"
        self.file.write_text("".join(f"{one.url}\n" for one in self.all))
        self._folder = folder

    def __enter__(self) -> Replicas:
        try:
            for replica in self.all:
                replica.start()
            end_s = time.monotonic() + _READY_S
            while not all(replica.is_ready for replica in self.all):
                if time.monotonic() > end_s or not all(one.is_running for one in self.all):
                    raise SystemExit(f"a replica did not start: {self._logs()}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all."""
        for replica in self.all:
            replica.close()

    def _logs(self) -> str:
        return "\n".join(log.read_text()[-600:] for log in self._folder.glob("*.log"))


def _put_first(pid: int) -> int:
    """Let a process that has just started come before others at the processors, where that is
    allowed; return its nice value."""
    with suppress(PermissionError):  # of an unprivileged user
        os.setpriority(os.PRIO_PROCESS, pid, GATEWAY_NICE)
    return os.getpriority(os.PRIO_PROCESS, pid)


class Front(Protocol):
    """What clients send their requests to."""

    port: int
    nice: int

    def states(self) -> dict[str, dict[str, Any]]:
        """Return by address whether a replica takes requests, and how many are open there."""


class Router:
    """`quire route` before the replicas of `file`. num_slow_reads: times that /health or /metrics
    was read again, since no answer came. nice: its priority at the processors."""

    def __init__(self, file: Path, *flags: str) -> None:
        self.num_slow_reads = 0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        words = ("--replicas-file", str(file), "--port", "0", *flags)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quire", "route", *words],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        self.nice = _put_first(self._process.pid)
        assert self._process.stdout is not None, "it was asked for a pipe"
        found = re.search(r":(\d+),", self._process.stdout.readline())
        if found is None:
            raise SystemExit(f"the router did not start: {self._output()}")
        self.port = int(found[1])

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None, "it was asked for a pipe"
        self._process.stdout.close()
        self._log.close()

    def states(self) -> dict[str, dict[str, Any]]:
        """See Front: as the router knows it."""
        return {one["url"]: one for one in json.loads(self.get("/health"))["replicas"]}

    def get(self, path: str) -> bytes:
        """Return the body of a GET, asked for again where no answer comes."""
        for num_left in reversed(range(_NUM_TRIES)):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
            try:
                connection.request("GET", path)
                return connection.getresponse().read()
            except (OSError, http.client.HTTPException) as error:
                if not num_left or self._process.poll() is not None:
                    raise SystemExit(
                        f"the router does not answer {path} ({error!r}): {self._output()}"
                    ) from error
                self.num_slow_reads += 1
                print(f"the router did not answer {path} ({error!r}); again", file=sys.stderr)
            finally:
                connection.close()
        raise AssertionError("the last try returns or raises")

    def metrics(self) -> dict[str, float]:
        """Return all samples by name and labels."""
        lines = self.get("/metrics").decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def cpu_s(self) -> float:
        """Return the processor time so far."""
        return sum(cpu_s(self._process.pid).values())

    def log(self) -> list[str]:
        """Return the lines of its log so far."""
        return os.pread(self._log.fileno(), _MAX_LOG_BYTES, 0).decode(errors="replace").splitlines()

    def _output(self) -> str:
        return "\n".join(self.log())[-600:]


class Smg(_Closing):
    """SMG before the same replicas, from an environment of its own (bench/peers/setup smg).

    prefill: computes the prompts of the replicas, which fetch their KV blocks from there.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        policy: str = "round_robin",
        prefill: Replica | None = None,
    ) -> None:
        if not is_installed("smg"):
            raise SystemExit("smg is not installed; run bench/peers/setup smg")
        self._replicas, self._prefill = replicas, prefill
        self.port, metrics_port = _free_ports(2)
        workers = ["--worker-urls", *(one.url for one in replicas)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        command = environment_python("smg").parent / "smg"
        self._process = subprocess.Popen(
            [
                *(str(command), "launch", "--host", "127.0.0.1", "--port", str(self.port)),
                *(workers if prefill is None else ["--pd-disaggregation"]),
                *("--policy", policy, "--prometheus-port", str(metrics_port), *_SMG_FLAGS),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self.nice = _put_first(self._process.pid)

    def __enter__(self) -> Smg:
        end_s = time.monotonic() + _READY_S
        is_registered = self._prefill is None
        while not (is_registered and self._is_ready()):
            is_registered = is_registered or self._register_pair()
            if time.monotonic() > end_s or self._process.poll() is not None:
                log = self.log()
                self.close()
                raise SystemExit(f"smg did not start: {log}")
            time.sleep(0.2)
        return self

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def states(self) -> dict[str, dict[str, Any]]:
        """See Front: by the replicas themselves, since it does not report theirs."""
        return {one.url: one.state(1.0) for one in self._replicas}

    def log(self) -> str:
        """Return the end of its log."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")[-2000:]

    def _is_ready(self) -> bool:
        """Whether it answers a request through a replica."""
        body = {"model": "box", "prompt": "Once", "max_tokens": 1, "seed": 1}
        return self._post("/v1/completions", body) == 200

    def _register_pair(self) -> bool:
        """Name prefill and decode servers with how they exchange blocks; return whether it is up.

        Servers named in its flags are sent no kv_transfer_params.
        """
        assert self._prefill is not None
        roles = [("prefill", self._prefill), *(("decode", one) for one in self._replicas)]
        for role, one in roles:
            worker = {"url": one.url, "worker_type": role, "kv_connector": "NixlConnector"}
            if self._post("/workers", worker) is None:
                return False
        return True

    def _post(self, path: str, body: dict[str, Any]) -> int | None:
        """Return the status of an answer; None for no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; the replicas take them at once and keep them."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
