"""From launched engine processes to the one engine that all requests of a server use.

Knows no HTTP. Always holds: supervision and data parallelism are imported only where they are set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import EngineProcess

if TYPE_CHECKING:
    from quire.engine.data_parallel.data_parallel_engine import DataParallelEngine
    from quire.engine.supervised.supervised_engine import SupervisedEngine

    ServedEngine = EngineClient | SupervisedEngine | DataParallelEngine


def served_engine(
    engines: Sequence[tuple[EngineConfig, EngineProcess]], server: ServerConfig, log: Log
) -> ServedEngine:
    """Return the engine of a server. engines: the configurations and their processes."""
    clients = [_client(config, process, server, log) for config, process in engines]
    if len(clients) == 1:
        return clients[0]
    from quire.engine.data_parallel.data_parallel_engine import DataParallelEngine

    return DataParallelEngine(dict(enumerate(clients)), log)


def _client(
    config: EngineConfig, process: EngineProcess, server: ServerConfig, log: Log
) -> EngineClient | SupervisedEngine:
    """Return a client of an engine, which is started again when it dies where that is set."""
    client = EngineClient.attach(process, config, watchdog_s=server.watchdog_s)
    if not server.restart_engine:
        return client
    from quire.engine.supervised.own_successors import OwnSuccessors
    from quire.engine.supervised.restarts import Restarts
    from quire.engine.supervised.supervised_engine import SupervisedEngine

    successors = OwnSuccessors(
        process,
        config,
        server.logging,
        Restarts(server.restart_limit),
        watchdog_s=server.watchdog_s,
        log=log,
    )
    return SupervisedEngine(client, successors, log, wakers=successors)
