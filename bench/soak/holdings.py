"""Count what an idle server holds: descriptors, tasks, threads, memory, blocks.

Reads /proc, /metrics and the number that server.py writes. `idle` waits until all requests are over
and the counts have returned to their baseline; a count that has not within the time is a leak.
"""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frontend.servers import Child
from quire.bench.cpu_use import rss_bytes

_LIMIT_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Counts of the server and engine processes, and memory of both in bytes."""

    descriptors: int
    engine_descriptors: int
    tasks: int
    blocks: int
    open_requests: int
    engine_requests: int
    memory_bytes: int
    engine_memory_bytes: int

    def beyond(self, before: Holdings) -> list[str]:
        """Return the counts above their baseline; memory is no count."""
        was = asdict(before)
        return [
            f"{name}: {value}, before {was[name]}"
            for name, value in asdict(self).items()
            if not name.endswith("memory_bytes") and value > was[name]
        ]


def holdings(server: Child, tasks_file: Path) -> Holdings:
    """Return the current counts. `tasks_file`: the file in which server.py writes its tasks."""
    engine = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
        metrics = reply.read().decode()
    return Holdings(
        tasks=_tasks(server, tasks_file),  # by then the connection of the line above is closed
        descriptors=len(os.listdir(f"/proc/{server.pid}/fd")),
        engine_descriptors=len(os.listdir(f"/proc/{engine}/fd")),
        blocks=_metric(metrics, "quire_kv_blocks_used"),
        open_requests=_metric(metrics, "quire_open_requests") - 1,  # that for the metrics
        engine_requests=_metric(metrics, "quire_running_requests")
        + _metric(metrics, "quire_waiting_requests"),
        memory_bytes=rss_bytes(server.pid),
        engine_memory_bytes=rss_bytes(engine),
    )


def idle(server: Child, tasks_file: Path, before: Holdings | None = None) -> Holdings:
    """Return the idle server's counts, above `before` only if they stay there."""
    end_s = time.monotonic() + _LIMIT_S
    while True:
        found = holdings(server, tasks_file)
        rests = not (found.open_requests or found.engine_requests or found.blocks)
        if rests and (before is None or not found.beyond(before)):
            return found
        if time.monotonic() > end_s:
            return found
        time.sleep(_POLL_S)


def _tasks(server: Child, tasks_file: Path) -> int:
    tasks_file.unlink(missing_ok=True)
    os.kill(server.pid, signal.SIGUSR1)
    end_s = time.monotonic() + _LIMIT_S
    while not tasks_file.exists():
        if time.monotonic() > end_s:
            raise SystemExit("the server did not report its tasks")
        time.sleep(_POLL_S)
    return int(tasks_file.read_text())


def _metric(text: str, name: str) -> int:
    """Return the sum of a metric over its labels. Exits if the server has no such metric."""
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise SystemExit(f"the server has no metric {name}")
    return int(sum(map(float, found)))
