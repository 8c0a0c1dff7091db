"""Settings of a server and of its engine that do not go together.

Knows both groups and no machine. Always holds: what is refused here is refused before a port is
bound or an engine started, by whatever program serves.
"""

from __future__ import annotations

from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig


def check_together(server: ServerConfig, engine: EngineConfig) -> None:
    """Raise SettingError where a server cannot have an engine of these settings."""
    executor = engine.executor
    if server.restart_engine and executor.distributed_executor_backend == "external_launcher":
        raise SettingError(
            "restart_engine is given and distributed_executor_backend is external_launcher: "
            "its ranks end with the engine; leave it out, and let the launcher start all ranks "
            "again"
        )
