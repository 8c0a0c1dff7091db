"""Start an engine process on some processors only: a share of the machine's cores.

A child inherits the processors of the thread that starts it. Knows no ranks. Always holds: the
calling thread runs where it ran before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.engine.client.launch import EngineProcess


def launch_bound(
    config: EngineConfig, logging: LogSettings | None, cpus: Sequence[int]
) -> EngineProcess:
    """Start an engine that runs on these processors; on all for none. Raises SettingError."""
    with _bound(cpus):
        process = EngineProcess.launch(config, logging)
    process.cpus = tuple(cpus)
    return process


@contextmanager
def _bound(cpus: Sequence[int]) -> Iterator[None]:
    """Bind this thread meanwhile. A system that refuses leaves it as it is."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
