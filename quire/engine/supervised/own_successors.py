"""OwnSuccessors: start the next engine process of this server, after a back-off, up to a limit.

An engine that cannot start counts as one that died. While the engine sleeps, a spare process waits
with its modules imported, which is a good part of a start. Knows no requests. Always holds: at most
one process has a model, since the one before has ended when the next begins.
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
from quire.engine.client.tokenizer_side import TokenizerSide
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
        self._spare: EngineProcess | None = None
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

    async def next(self, reason: str, text_side: TokenizerSide | None = None) -> EngineClient:
        """Start engines until one is ready. Raises WorkerError where the limit is reached."""
        while True:
            delay_s = self._restarts.next_delay_s(_now_s())
            if delay_s is None:
                raise WorkerError(self._restarts.given_up())
            await asyncio.sleep(delay_s)
            try:
                return await self.wake(text_side)
            except QuireError as error:
                reason = str(error)
                self._log.error("the engine cannot be restarted", reason=reason)

    def prepare(self) -> None:
        """Start the spare process of the next engine; without one, a wake takes longer."""
        try:
            self._spare = self._launched(is_spare=True)
        except QuireError as error:
            self._log.warning("no process waits for the wake", reason=str(error))

    async def wake(self, text_side: TokenizerSide | None = None) -> EngineClient:
        """Start the next engine after one that was ended. Raises what kept it from starting."""
        self._process = await self._taken_spare() or self._launched()
        client = await self._ready(text_side)
        self._restarts.served(_now_s())
        return client

    async def end_spare(self) -> None:
        """End the spare process, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await asyncio.to_thread(spare.end, 0.0)

    def _launched(self, *, is_spare: bool = False) -> EngineProcess:
        cpus = self._process.cpus
        return launch_bound(self._config, self._logging, cpus, is_spare=is_spare)

    async def _taken_spare(self) -> EngineProcess | None:
        """Return the spare process, which begins; None without one that can."""
        spare = self._spare
        if spare is None:
            return None
        if not spare.can_begin:
            await self.end_spare()
            return None
        self._spare = None
        spare.begin()
        return spare

    async def _ready(self, text_side: TokenizerSide | None) -> EngineClient:
        try:
            client = EngineClient.attach(self._process, self._config, watchdog_s=self._watchdog_s)
        except QuireError:
            await asyncio.to_thread(self._process.end, 0.0)
            raise
        try:
            await client.ready(text_side)  # it is closed where this raises QuireError
        except BaseException as error:
            if not isinstance(error, QuireError):
                await client.close()
            raise
        return client


def _now_s() -> float:
    return Clock().now_ms() / 1000.0
