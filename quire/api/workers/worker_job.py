"""The protocol between the supervisor of several API processes and each of them.

The job that a process is started with, the orders and reports between them, and the path of a
process's private socket. Knows neither side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Orders: lines of one word. ENGINE_ENDED is followed by the engine's number, its exit code, and by
# the failure report in hex if there is one.
STOP, RELOAD, ENGINE_ENDED = "stop", "reload", "engine-ended"
# With a supervised engine: another one serves, followed by the engine's number, the number of
# restarts and its directory; there will be no other, followed by its number and the reason in hex.
ENGINE_STARTED, ENGINE_LOST = "engine-started", "engine-lost"
# Reports: lines of JSON, an object of one key and its value. STALLED: the engine of this directory
# makes no progress, and the reason.
SERVES, FAILED, STALLED = "serves", "failed", "stalled"

SOCKET_PREFIX = "peer."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """One engine. number: among those of the server. folder: of its sockets, "" while it is being
    started again. restarts: so far. config: its configuration as a line."""

    number: int
    folder: str
    restarts: int
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job of one process. number: never reused. slot: that of the process it replaces. home: of
    private sockets. engines: those that are not gone. routing: the file of what several engines are
    chosen by; "" for one. listening, admins: descriptors of sockets, the latter for the process
    with --admin-port. counts: the directory of shared metrics. replaces: it replaces a process that
    ended."""

    number: int
    slot: int
    home: str
    engines: Sequence[EngineJob]
    routing: str
    counts: str
    listening: int
    admins: int | None
    replaces: bool
    server: Mapping[str, Any]


def job_line(job: WorkerJob) -> bytes:
    """Return a job as a line."""
    return json.dumps(asdict(job)).encode() + b"\n"


def job_of(line: bytes) -> WorkerJob:
    """Return the job of a line."""
    job = json.loads(line)
    return WorkerJob(**{**job, "engines": [EngineJob(**one) for one in job["engines"]]})


def socket_path(home: Path, number: int) -> Path:
    """Return the path of a process's private socket."""
    return home / f"{SOCKET_PREFIX}{number}"
