"""One of several API processes that share engines; supervisor.py starts `main`.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.api.server import run
from quire.api.workers.ordered_successors import OrderedSuccessors
from quire.api.workers.process_beats import ProcessBeats
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.api.workers.worker_engines import WorkerEngines
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
from quire.base.errors import QuireError, WorkerError
from quire.base.log import Log
from quire.base.log_process import start_logging
from quire.config.server_config import ServerConfig
from quire.config.tenants import read_tenants_of_server
from quire.engine.client.launch import SharedEngine, config_from_json
from quire.engine.process.messages import fault_of

SUPERVISOR_GONE = 3
REFUSED = 2


class PipeWorkerContext:
    """The WorkerContext (server.py) of a process that gets orders over standard input. engines:
    those that orders are about, by number."""

    def __init__(
        self, job: WorkerJob, engines: Mapping[int, SharedEngine | OrderedSuccessors]
    ) -> None:
        self.folder = Path(job.counts)
        num_processes = int(job.server["api_processes"])
        beats = ProcessBeats(
            Path(job.home), slot=job.slot, num_slots=num_processes, number=job.number
        )
        beats.start()
        self.siblings = SiblingWorkers(Path(job.home), job.number, beats)
        self.sees_steps = job.slot == 0
        self.replaces = job.replaces
        self._engines = engines

    def follow(self, *, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """Follow the orders of the supervisor from now on."""
        orders = {STOP: stop, RELOAD: reload}
        loop = asyncio.get_running_loop()
        for engine in self._engines.values():
            if isinstance(engine, OrderedSuccessors):
                engine.follow(loop)
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
                order, *details = line.decode().split(" ", 3)
                if details:
                    self._follow_engine(order, int(details[0]), details[1:])
                else:
                    loop.call_soon_threadsafe(orders[order])
        os._exit(SUPERVISOR_GONE)

    def _follow_engine(self, order: str, number: int, details: Sequence[str]) -> None:
        """Pass on what happened to an engine; one that was gone before this process is none."""
        engine = self._engines.get(number)
        if engine is None:
            return
        if order == ENGINE_ENDED:
            engine.ended(int(details[0]), bytes.fromhex("".join(details[1:])))
        elif isinstance(engine, OrderedSuccessors):
            if order == ENGINE_STARTED:
                engine.started(int(details[0]), Path(details[1]))
            elif order == ENGINE_LOST:
                engine.lost(bytes.fromhex(details[0]).decode())


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
    if not any(one.folder for one in job.engines):  # since a moment ago; another is tried
        raise WorkerError("no engine runs")
    path = config_from_json(job.engines[0].config).scheduler.tenants

    def read() -> Any:
        assert path is not None, "only called if there is a file"
        return read_tenants_of_server(path, has_keys=bool(server.api_key))

    log = Log(f"server {job.number}")
    engines = WorkerEngines(job, server, log, report)
    served = engines.served()

    def announce() -> None:
        template = served.template
        report(SERVES, None if template is None else list(template.problems.values()))

    return run(
        served,
        server,
        socket.socket(fileno=job.listening),
        log,
        announce=announce,
        for_admins=None if job.admins is None else socket.socket(fileno=job.admins),
        tenants=None if path is None else read(),
        read_tenants=None if path is None else read,
        tenants_file=path,
        worker=PipeWorkerContext(job, engines.ordered),
    )


def _tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are tuples in the config and lists in JSON."""
    return {name: tuple(value) for name, value in group.items() if isinstance(value, list)}
