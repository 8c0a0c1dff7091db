"""What the keeper of several API processes and each of them agree on.

The job that a process is started with, the words of orders and reports between them, and where a
process's private socket lies. Knows neither side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Orders: lines of one word. ENGINE_ENDED is followed by the exit code, and by the failure report in
# hex if there is one.
STOP, REREAD, ENGINE_ENDED = "stop", "reread", "engine-ended"
# Reports: lines of JSON, a word and what belongs to it.
SERVES, FAILED = "serves", "failed"

PEER_NAME = "peer."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What one process is to do. number: never used again. folder: the engine's. listening, admins:
    descriptors of sockets, the latter where it has that of --admin-port. counts: the folder of
    shared counts. sees_steps: it observes the engine's steps. replaces: another
    was in its place. engine: its config as a line."""

    number: int
    folder: str
    counts: str
    listening: int
    admins: int | None
    sees_steps: bool
    replaces: bool
    server: Mapping[str, Any]
    engine: str


def job_line(job: WorkerJob) -> bytes:
    """A job as it is sent."""
    return json.dumps(asdict(job)).encode() + b"\n"


def job_of(line: bytes) -> WorkerJob:
    """The job of a line."""
    return WorkerJob(**json.loads(line))


def socket_path(folder: Path, number: int) -> Path:
    """Where the private socket of a process lies."""
    return folder / f"{PEER_NAME}{number}"
