"""One of several API processes that share an engine; supervisor.py starts `main`.

The first line of standard input is its job, further lines are orders of the supervisor, and the end
of input means that the supervisor has ended, and ends this process at once. Reports go to standard
output as lines of JSON: that it serves, or why it cannot. Signals are handled by the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.api.engine_protocol import StartingEngine
from quire.api.server import run
from quire.api.workers.ordered_successors import OrderedSuccessors
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.api.workers.worker_job import (
    ENGINE_ENDED,
    ENGINE_LOST,
    ENGINE_STARTED,
    FAILED,
    RELOAD,
    SERVES,
    STOP,
    WorkerJob,
    job_of,
)
from quire.base.errors import QuireError
from quire.base.log import Log
from quire.base.log_process import start_logging
from quire.config.server_config import ServerConfig
from quire.config.tenants import read_tenants_of_server
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import SharedEngine, config_from_json
from quire.engine.process.messages import fault_of

SUPERVISOR_GONE = 3
REFUSED = 2


class PipeWorkerContext:
    """The WorkerContext (server.py) of a process that gets orders over standard input."""

    def __init__(
        self, job: WorkerJob, engine: SharedEngine, successors: OrderedSuccessors | None
    ) -> None:
        self.folder = Path(job.counts)
        self.siblings = SiblingWorkers(Path(job.home), job.number)
        self.sees_steps = job.sees_steps
        self.replaces = job.replaces
        self._engine = engine
        self._successors = successors

    def follow(self, *, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """Follow the orders of the supervisor from now on."""
        orders = {STOP: stop, RELOAD: reload}
        loop = asyncio.get_running_loop()
        if self._successors is not None:
            self._successors.follow(loop)
        threading.Thread(
            target=self._listen, args=(loop, orders), name="quire-supervisor-watch", daemon=True
        ).start()

    def _listen(
        self, loop: asyncio.AbstractEventLoop, orders: Mapping[str, Callable[[], None]]
    ) -> None:
        # The descriptor, not the buffered file: a thread that blocks in the latter holds its lock
        # while the interpreter shuts down.
        rest = b""
        while piece := os.read(sys.stdin.fileno(), 4096):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                order, *details = line.decode().split(" ", 2)
                if order == ENGINE_ENDED:
                    exit_code, failure = int(details[0]), "".join(details[1:])
                    engine = self._engine if self._successors is None else self._successors
                    engine.ended(exit_code, bytes.fromhex(failure))
                elif order == ENGINE_STARTED and self._successors is not None:
                    self._successors.started(int(details[0]), Path(details[1]))
                elif order == ENGINE_LOST and self._successors is not None:
                    self._successors.lost(bytes.fromhex(details[0]).decode())
                else:
                    loop.call_soon_threadsafe(orders[order])
        os._exit(SUPERVISOR_GONE)


def main() -> int:
    """Serve until stopped; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = _first_line()
    if not line:
        return SUPERVISOR_GONE
    # Keep the output of libraries out of the reports.
    reports = os.dup(1)
    os.dup2(2, 1)

    def report(what: str, value: Any) -> None:
        os.write(reports, json.dumps({what: value}).encode() + b"\n")

    try:
        return _serve(job_of(line), report)
    except QuireError as error:
        fault = fault_of(error)
        report(FAILED, [fault.kind, fault.message])
        return REFUSED


def _first_line() -> bytes:
    """Read one line without a buffer: `_listen` reads the rest from the descriptor."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 1)
        if not piece:
            return b""
        line += piece
    return line


def _serve(job: WorkerJob, report: Callable[[str, Any], None]) -> int:
    server = ServerConfig(**{**job.server, **_tuples(job.server)})
    start_logging(f"server {job.number}", server.logging)
    sys.stdout = sys.stderr  # for the output of libraries
    config = config_from_json(job.engine)
    path = config.scheduler.tenants

    def read() -> Any:
        assert path is not None, "only called if there is a file"
        return read_tenants_of_server(path, has_keys=bool(server.api_key))

    engine = SharedEngine(Path(job.folder), job.number)
    client = EngineClient.attach(engine, config, watchdog_s=server.watchdog_s)
    served: StartingEngine = client
    successors = None
    if server.restart_engine:
        from quire.engine.supervised.supervised_engine import SupervisedEngine  # only if asked for

        successors = OrderedSuccessors(
            engine, config, report, num_restarts=job.restarts, watchdog_s=server.watchdog_s
        )
        served = SupervisedEngine(client, successors, Log(f"server {job.number}"))

    def announce() -> None:
        template = client.template
        report(SERVES, [] if template is None else list(template.problems.values()))

    return run(
        served,
        server,
        socket.socket(fileno=job.listening),
        Log(f"server {job.number}"),
        announce=announce,
        for_admins=None if job.admins is None else socket.socket(fileno=job.admins),
        tenants=None if path is None else read(),
        read_tenants=None if path is None else read,
        tenants_file=path,
        worker=PipeWorkerContext(job, engine, successors),
    )


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are tuples in the config and lists in JSON."""
    return {name: tuple(value) for name, value in group.items() if isinstance(value, list)}
