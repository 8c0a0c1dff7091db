"""Counters of several processes, summed by the process that is scraped.

Each process writes its counts to its own files in one directory (multiprocess mode of
prometheus_client, chosen by an environment variable that is read on import), so counts survive
their process, and counters only grow. Gauges of a process (open requests) are removed when it ends.
Independent of metric names.
"""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_counts(folder: Path) -> None:
    """Write counts of this process to `folder`; call before importing quire.obs.metrics."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[_VARIABLE] = str(folder)


def forget_process(folder: Path, process_id: int) -> None:
    """Remove the gauges of a process that has ended."""
    for file in folder.glob(f"gauge_live*_{process_id}.db"):
        file.unlink(missing_ok=True)
