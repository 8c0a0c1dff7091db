"""OwnSuccessors: start the next engine process of this server, after a back-off, up to a limit.

An engine that cannot start counts as one that died. Knows no requests. Always holds: at most one
engine process runs, since the one before has ended when the next is started.
"""

from __future__ import annotations

import asyncio

from quire.base.clock import Clock
from quire.base.errors import QuireError, WorkerError
from quire.base.log import Log
from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.engine.client.bound_launch import launch_bound
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import EngineProcess
from quire.engine.supervised.restarts import Restarts


class OwnSuccessors:
    """process: the engine that runs. A failure to start counts as a death."""

    def __init__(
        self,
        process: EngineProcess,
        config: EngineConfig,
        logging: LogSettings,
        restarts: Restarts,
        *,
        watchdog_s: float,
        log: Log,
    ) -> None:
        self._process = process
        self._config = config
        self._logging = logging
        self._restarts = restarts
        self._watchdog_s = watchdog_s
        self._log = log
        restarts.served(_now_s())

    @property
    def num_restarts(self) -> int:
        """Restarts so far."""
        return self._restarts.num_total

    def kill(self, reason: str) -> None:
        """End the engine that runs at once."""
        self._process.kill()

    async def next(self, reason: str) -> EngineClient:
        """Start engines until one is ready. Raises WorkerError where the limit is reached."""
        while True:
            delay_s = self._restarts.next_delay_s(_now_s())
            if delay_s is None:
                raise WorkerError(self._restarts.given_up())
            await asyncio.sleep(delay_s)
            try:
                return await self.wake()
            except QuireError as error:
                reason = str(error)
                self._log.error("the engine cannot be restarted", reason=reason)

    async def wake(self) -> EngineClient:
        """Start the next engine after one that was ended. Raises what kept it from starting."""
        self._process = launch_bound(self._config, self._logging, self._process.cpus)
        client = await self._ready()
        self._restarts.served(_now_s())
        return client

    async def _ready(self) -> EngineClient:
        client = EngineClient.attach(self._process, self._config, watchdog_s=self._watchdog_s)
        try:
            await client.ready()  # it is closed where this raises QuireError
        except BaseException as error:
            if not isinstance(error, QuireError):
                await client.close()
            raise
        return client


def _now_s() -> float:
    return Clock().now_ms() / 1000.0
