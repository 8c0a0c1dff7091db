"""OrderedSuccessors: engines that the supervisor starts, as one API process sees them.

The supervisor restarts the engine once for all API processes; each is sent the directory of the
next one. Calls come from the thread that reads the orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.api.workers.worker_job import STALLED
from quire.base.errors import QuireError, WorkerError
from quire.config.groups import EngineConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import SharedEngine
from quire.engine.client.tokenizer_side import TokenizerSide


class OrderedSuccessors:
    """engine: the one that runs; None while it is being started again. client: number of this
    process. report: sends a report to the supervisor."""

    def __init__(
        self,
        engine: SharedEngine | None,
        client: int,
        config: EngineConfig,
        report: Callable[[str, Any], None],
        *,
        num_restarts: int,
        watchdog_s: float,
    ) -> None:
        self.engine = engine
        self._client = client
        self.num_restarts = num_restarts
        self._config = config
        self._report = report
        self._watchdog_s = watchdog_s
        self._next: asyncio.Queue[SharedEngine | str] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver orders in this event loop."""
        self._loop = loop

    def ended(self, exit_code: int, failure: bytes) -> None:
        """Note that the engine has ended."""
        if self.engine is not None:  # else it was none of ours
            self.engine.ended(exit_code, failure)

    def started(self, num_restarts: int, folder: Path) -> None:
        """Another engine serves."""
        self.num_restarts = num_restarts
        self.engine = SharedEngine(folder, self._client)
        self._deliver(self.engine)

    def lost(self, reason: str) -> None:
        """Fail those that wait: no other engine will be started."""
        self._deliver(reason)

    def kill(self, reason: str) -> None:
        """Report that the engine makes no progress; the supervisor ends it."""
        if self.engine is not None:
            self._report(STALLED, [str(self.engine.folder), reason])

    async def next(self, reason: str, text_side: TokenizerSide | None = None) -> EngineClient:
        """Wait for the next engine. Raises WorkerError if there will be none."""
        while True:
            engine = await self._next.get()
            if isinstance(engine, str):
                raise WorkerError(engine)
            client = EngineClient.attach(engine, self._config, watchdog_s=self._watchdog_s)
            try:
                await client.ready(text_side)  # it is closed where this raises QuireError
            except QuireError:
                continue  # it has died as well, and the supervisor starts another
            except BaseException:
                await client.close()
                raise
            return client

    def _deliver(self, engine: SharedEngine | str) -> None:
        assert self._loop is not None, "orders are read once they are followed"
        self._loop.call_soon_threadsafe(self._next.put_nowait, engine)
