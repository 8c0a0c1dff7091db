"""Start an engine process on some processors only: a share of the machine's cores.

A child inherits the processors of the thread that starts it. Knows no ranks. Always holds: the
calling thread runs where it ran before.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.engine.client.launch import EngineProcess
from quire.ranks.placement import running_on


def launch_bound(
    config: EngineConfig,
    logging: LogSettings | None,
    cpus: Sequence[int],
    *,
    is_spare: bool = False,
) -> EngineProcess:
    """Start an engine that runs on these processors; on all for none. Raises SettingError.

    is_spare: see EngineProcess.launch.
    """
    with running_on(cpus):
        process = EngineProcess.launch(config, logging, is_spare=is_spare)
    process.cpus = tuple(cpus)
    return process
