"""EngineSupervisor: one engine process of the supervisor, from its start to its end.

With --restart-engine it is started again when it dies, after a back-off and up to a limit. Clients
are named by their numbers; knows no API process. Always holds: `fault` is set once there will be no
further engine, and the owner is informed of each change after that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from quire.api.workers.worker_job import ENGINE_ENDED, ENGINE_LOST, ENGINE_STARTED, EngineJob
from quire.base.clock import Clock
from quire.base.errors import QuireError, WorkerError
from quire.base.log import Log
from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.engine.client.bound_launch import launch_bound
from quire.engine.client.launch import EngineProcess, config_to_json
from quire.engine.client.process_link import ProcessLink
from quire.engine.process.messages import (
    Failed,
    Fault,
    FromEngine,
    Join,
    Leave,
    Loading,
    Ready,
    fault_of,
)
from quire.engine.supervised.restarts import Restarts


class Owner(Protocol):
    """What an EngineSupervisor informs."""

    @property
    def announced(self) -> bool:
        """Whether the server accepts requests: before, an engine that ends is not restarted."""

    def engine_ready(self, engine: EngineSupervisor) -> None:
        """Note that the engine is ready, for the first time or again."""

    def engine_loading(self) -> None:
        """More of the weights are loaded."""

    def engine_changed(self, engine: EngineSupervisor) -> None:
        """Note that the engine has ended, serves again, or is gone for good."""

    def order_all(self, order: str) -> None:
        """Send an order to all API processes."""


class EngineSupervisor:
    """process: the engine's first. restarts: None where it is not started again.

    is_there: it runs, or is starting for the first time. loaded: bytes of its weights, and all.
    """

    def __init__(
        self,
        number: int,
        process: EngineProcess,
        config: EngineConfig,
        logging: LogSettings,
        log: Log,
        owner: Owner,
        restarts: Restarts | None = None,
    ) -> None:
        self.number = number
        self.is_there = True
        self.ready: Ready | None = None
        self.fault: Fault | None = None
        self.loaded = (0, 0)
        self._process = process
        self._config = config
        self._logging = logging
        self._log = log
        self._owner = owner
        self._restarts = restarts
        self._link: ProcessLink | None = ProcessLink(process)
        self._failure = ""
        self._loaded, self._ended = asyncio.Event(), asyncio.Event()
        self._restarting: asyncio.Future[None] | None = None

    @property
    def folder(self) -> Path:
        """The directory of the engine's sockets."""
        return self._process.folder

    def open(self) -> None:
        """Follow the engine in the running event loop."""
        assert self._link is not None, "there is an engine"
        self._link.open(asyncio.get_running_loop(), self._on_message, self._on_end)

    def job(self) -> EngineJob | None:
        """Return what an API process that starts now needs; None where the engine is gone."""
        if self.fault is not None:
            return None
        return EngineJob(
            number=self.number,
            folder=str(self.folder) if self.is_there else "",
            restarts=0 if self._restarts is None else self._restarts.num_total,
            config=config_to_json(self._config),
        )

    def join(self, client: int, process_id: int) -> None:
        """Let an API process use the engine, if it is ready; else it joins when it is."""
        if self.ready is not None and self._link is not None:
            self._link.send(Join(client=client, process_id=process_id))

    def leave(self, client: int) -> None:
        """End the requests of an API process that has ended."""
        if self.ready is not None and self._link is not None:
            self._link.send(Leave(client=client))

    def end_stalled(self, reason: str) -> None:
        """End an engine that makes no progress."""
        if self.is_there:
            self._log.error("the engine makes no progress", engine=self.number, reason=reason)
            self._failure = reason
            self._process.kill()

    async def close(self) -> None:
        """End the engine."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self._close_link()

    async def _close_link(self) -> None:
        """End the engine, if there is one, and free its sockets."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # ---- messages of the engine

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self.ready = message
            self._loaded.set()
            self._owner.engine_ready(self)
        elif isinstance(message, Loading):
            self.loaded = message.done_bytes, message.total_bytes
            self._owner.engine_loading()
        elif isinstance(message, Failed):
            self._failure = message.fault.message
            if not self._is_supervised:
                self._give_up(message.fault)

    def _on_end(self, reason: str) -> None:
        failure = self._process.failure().hex()
        was_there, self.is_there = self.is_there, False
        if not self._is_supervised:
            self._give_up(fault_of(WorkerError(reason)))
        elif was_there:
            self._restarting = asyncio.ensure_future(self._keep(self._failure or reason))
            self._owner.engine_changed(self)
        else:  # while it was started again
            self._ended.set()
        self._owner.order_all(f"{ENGINE_ENDED} {self.number} {self._process.wait(0)} {failure}")

    @property
    def _is_supervised(self) -> bool:
        return self._restarts is not None and self._owner.announced

    def _give_up(self, fault: Fault) -> None:
        if self.fault is None:
            self.fault = fault
            self._owner.engine_changed(self)

    # ---- a supervised engine

    async def _keep(self, reason: str) -> None:
        try:
            await self._restart(reason)
        except Exception as error:  # a bug: end the server rather than leave it without an engine
            self._give_up(fault_of(error))
            raise

    async def _restart(self, reason: str) -> None:
        """Start engines until one is ready, or give up where the limit is reached."""
        assert self._restarts is not None, "it is supervised"
        self._log.error("the engine died and is restarted", engine=self.number, reason=reason)
        while True:
            self.ready = None
            await self._close_link()
            delay_s = self._restarts.next_delay_s(Clock().now_ms() / 1000.0)
            if delay_s is None:
                break
            await asyncio.sleep(delay_s)
            if await self._start():
                self._restarts.served(Clock().now_ms() / 1000.0)
                self.is_there = True
                num_restarts = self._restarts.num_total
                self._log.event(
                    "the engine was restarted", engine=self.number, restarts=num_restarts
                )
                self._owner.engine_changed(self)
                started = f"{ENGINE_STARTED} {self.number} {num_restarts} {self.folder}"
                self._owner.order_all(started)
                return
            reason = self._failure or "it ended while it was starting"
            self._log.error("the engine cannot be restarted", engine=self.number, reason=reason)
        message = self._restarts.given_up()
        self._give_up(fault_of(WorkerError(message)))
        self._owner.order_all(f"{ENGINE_LOST} {self.number} {message.encode().hex()}")

    async def _start(self) -> bool:
        """Start an engine and wait until it is ready or has ended."""
        self._failure, self._ended = "", asyncio.Event()
        try:
            self._process = launch_bound(self._config, self._logging, self._process.cpus)
            self._link = await _linked(self._process)
        except QuireError as error:
            self._failure = str(error)
            return False
        self._loaded = asyncio.Event()
        self.open()
        ends = [asyncio.ensure_future(event.wait()) for event in (self._loaded, self._ended)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return not self._ended.is_set()


async def _linked(process: EngineProcess) -> ProcessLink:
    """Return a link to a process, which is ended where there is none. Raises WorkerError."""
    try:
        return ProcessLink(process)
    except WorkerError:
        await asyncio.to_thread(process.end, 0.0)
        raise
