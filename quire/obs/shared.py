"""Counts of several processes, added up by whichever is asked.

Each process keeps its counts in files of its own in one folder (prometheus_client's way, chosen by
an environment variable that it reads when it is imported), so what a process has counted stays
counted when it is gone, and counters only grow. What is true only of a living process (open
requests) leaves with it. Knows no metric by name.
"""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_counts(folder: Path) -> None:
    """Counts of this process go to `folder`. To be called before quire.obs.metrics is imported."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ[_VARIABLE] = str(folder)


def forget_process(folder: Path, process_id: int) -> None:
    """It has ended: what was true only while it lived is no more."""
    for file in folder.glob(f"gauge_live*_{process_id}.db"):
        file.unlink(missing_ok=True)
