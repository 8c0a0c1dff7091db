"""Supervise several API processes: start them, stop them, replace those that end.

    exit_code = supervise(engine, config, server, listening, log, announce=print_block)

The supervisor serves no request. All processes inherit one listening socket, so an idle one accepts
a connection, and none waits for a process that has ended. When one ends by itself, the engine is
notified and ends its requests, and another replaces it under a new number. SIGTERM or SIGINT: all
drain; a second signal ends everything at once. SIGHUP: all reload their files. If the engine dies,
all end; with --restart-engine it is started again, and all continue with the next one. Always
holds: each wait during shutdown has a limit; when this process ends, in any way, all others do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quire.api.service_manager import READY, STOPPING, notify, send_watchdog
from quire.api.workers.worker_job import (
    ENGINE_ENDED,
    ENGINE_LOST,
    ENGINE_STARTED,
    FAILED,
    RELOAD,
    SERVES,
    STALLED,
    STOP,
    WorkerJob,
    job_line,
    socket_path,
)
from quire.base.child_process import command_of, environment_of_ours
from quire.base.clock import Clock
from quire.base.errors import QuireError, SettingError, WorkerError
from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.engine.client.launch import EngineProcess, config_to_json
from quire.engine.client.process_link import ProcessLink
from quire.engine.client.socket_directory import SocketDirectory
from quire.engine.process.messages import (
    Failed,
    Fault,
    FromEngine,
    Join,
    Leave,
    Loading,
    Ready,
    error_of,
    fault_of,
)
from quire.engine.supervised.restarts import Restarts
from quire.obs.shared import forget_process, share_counts

EXIT_DONE = 0
EXIT_FAILED = 1
# Beyond the grace time: last events, and connections that close.
_SHUTDOWN_S = 10.0
# The delay before the next replacement of one that ended before it served; it doubles.
_RETRY_S = 0.5
_MAX_RETRY_S = 30.0
_COUNTS = "counts"


@dataclass(slots=True, eq=False)
class _Worker:
    """One API process. serves: set when it serves, to the problems of the model's chat templates.
    fault: the reason it reported for failing."""

    number: int
    process: asyncio.subprocess.Process
    serves: asyncio.Future[list[str]]
    fault: Fault | None = None

    def order(self, order: str) -> None:
        """Send an order; no effect if the process has ended."""
        assert self.process.stdin is not None, "created with a pipe"
        with suppress(OSError, RuntimeError):
            self.process.stdin.write(order.encode() + b"\n")


def supervise(
    engine: EngineProcess,
    config: EngineConfig,
    server: ServerConfig,
    listening: socket.socket,
    log: Log,
    *,
    announce: Callable[[Ready, Sequence[str]], None],
    for_admins: socket.socket | None = None,
    on_loading: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> int:
    """Serve until stopped; return the exit code.

    announce: called with the engine's Ready message and the problems of the templates once all
    processes serve. Raises what kept the engine, or one of the first processes, from starting.
    """
    supervisor = _Supervisor(engine, config, server, listening, for_admins, log, on_loading)
    return asyncio.run(supervisor.run(announce))


class _Supervisor:
    def __init__(
        self,
        engine: EngineProcess,
        config: EngineConfig,
        server: ServerConfig,
        listening: socket.socket,
        for_admins: socket.socket | None,
        log: Log,
        on_loading: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._server = server
        self._listening = listening
        self._num = server.api_processes
        self._for_admins = for_admins
        self._log = log
        self._on_loading = on_loading
        self._link = ProcessLink(engine)
        self._restarts: Restarts | None = None
        self._own_home: SocketDirectory | None = None
        if server.restart_engine:
            self._restarts, self._own_home = Restarts(server.restart_limit), SocketDirectory()
        self._home = engine.folder if self._own_home is None else self._own_home.path
        self._counts = self._home / _COUNTS
        self._children: dict[int, _Worker] = {}  # by slot
        self._num_started = 0
        self._ready: Ready | None = None
        self._engine_loaded, self._engine_ended = asyncio.Event(), asyncio.Event()
        self._failure = ""
        self._fault: Fault | None = None
        self._announced = False
        share_counts(self._counts)
        # Imported after share_counts, which sets where counts are kept.
        from quire.obs.series import restarts_counter

        self._replaced = restarts_counter()

    async def run(self, announce: Callable[[Ready, Sequence[str]], None]) -> int:
        self._stopped, self._died, self._unable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._engine_up = asyncio.Event()
        self._engine_up.set()
        self._restarting: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._order_all, RELOAD)
        self._link.open(loop, self._on_message, self._on_end)
        tasks: list[asyncio.Future[None]] = []
        try:
            for slot in range(self._num):
                self._children[slot] = await self._start(slot)
            tasks = [asyncio.ensure_future(self._supervise_slot(slot)) for slot in self._children]
            return await self._serve(announce)
        finally:
            if self._restarting is not None:
                tasks.append(self._restarting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_children()
            await self._link.close()
            if self._own_home is not None:
                self._own_home.remove()

    async def _serve(self, announce: Callable[[Ready, Sequence[str]], None]) -> int:
        server_state = asyncio.ensure_future(self._all_serve())
        ends = [
            asyncio.ensure_future(event.wait())
            for event in (self._stopped, self._died, self._unable)
        ]
        stopped, died, unable = ends
        watchdog = asyncio.ensure_future(send_watchdog())
        try:
            await asyncio.wait({server_state, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if server_state.done() and not (died.done() or unable.done()):
                problems = server_state.result()
                assert self._ready is not None, "the processes serve only then"
                self._announced = True
                announce(self._ready, problems)
                notify(READY)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if unable.done():
                    raise self._reason
            elif stopped.done():
                self._log.event("stopped while the model was loading")
                return EXIT_DONE
            else:
                raise self._reason
            return (
                await self._drain(died) if stopped.done() else await self._end_after_engine_death()
            )
        finally:
            for task in (server_state, watchdog, *ends):
                task.cancel()
            await asyncio.gather(server_state, watchdog, *ends, return_exceptions=True)

    async def _all_serve(self) -> list[str]:
        """Wait until all first processes serve; return the problems of the templates."""
        problems = [await child.serves for child in list(self._children.values())]
        return problems[0]

    async def _drain(self, died: asyncio.Task[Literal[True]]) -> int:
        """Let each process drain and end; the remaining ones accept connections meanwhile."""
        notify(STOPPING)
        self._log.event("draining", grace_s=self._server.grace_s, api_processes=self._num)
        if self._for_admins is not None:
            self._for_admins.close()  # its process is about to end
        self._order_all(STOP)
        gone = asyncio.ensure_future(self._until_gone(self._server.grace_s + _SHUTDOWN_S))
        both: set[asyncio.Future[Any]] = {gone, died}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            gone.cancel()
            return await self._end_after_engine_death()
        self._log.event("stopped")
        return EXIT_DONE

    async def _end_after_engine_death(self) -> int:
        """Wait until the processes have reported the engine's death to their clients and ended."""
        assert self._fault is not None, "set when the engine died"
        self._log.error("the engine is dead; the server ends", reason=self._fault.message)
        await self._until_gone(_SHUTDOWN_S)
        return EXIT_FAILED

    @property
    def _reason(self) -> QuireError:
        assert self._fault is not None, "set when the engine died or a process failed"
        return error_of(self._fault)

    # ---- the processes

    async def _start(self, slot: int) -> _Worker:
        self._num_started += 1
        number, listening = self._num_started, self._listening
        admins = self._for_admins if slot == 0 else None
        job = WorkerJob(
            number=number,
            folder=str(self._engine.folder),
            home=str(self._home),
            restarts=0 if self._restarts is None else self._restarts.num_total,
            counts=str(self._counts),
            listening=listening.fileno(),
            admins=None if admins is None else admins.fileno(),
            sees_steps=slot == 0,
            replaces=number > self._num,
            server=asdict(self._server),
            engine=config_to_json(self._config),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command_of("quire.api.workers.worker"),
                stdin=PIPE,
                stdout=PIPE,
                env=environment_of_ours(),
                pass_fds=[listening.fileno()] + ([] if admins is None else [admins.fileno()]),
            )
        except OSError as error:
            raise SettingError(f"an API process cannot be started: {error}") from error
        child = _Worker(number, process, asyncio.get_running_loop().create_future())
        assert process.stdin is not None, "created with a pipe"
        process.stdin.write(job_line(job))
        if self._ready is not None:  # also since a moment ago; else it joins with the others
            self._link.send(Join(client=number))
        return child

    async def _supervise_slot(self, slot: int) -> None:
        try:
            await self._keep_running(slot)
        except Exception as error:  # a bug: end the server rather than serve with fewer processes
            self._fault = self._fault or fault_of(error)
            self._unable.set()
            raise

    async def _keep_running(self, slot: int) -> None:
        """Keep a process running in this slot until shutdown."""
        num_failed = 0
        while True:
            child = self._children[slot]
            await self._follow(child)
            reason = _exit_text(await child.process.wait())
            self._forget(child)
            if self._is_ending:
                return
            if not self._announced:
                self._give_up(child, reason)
                return
            self._log.error(
                "an API process ended and is replaced", process=child.number, reason=reason
            )
            self._replaced.inc()
            num_failed = 0 if child.serves.done() else num_failed + 1
            await self._replace(slot, num_failed)

    async def _replace(self, slot: int, num_failed: int) -> None:
        """Start another process in this slot, after a delay if the ones before failed to start."""
        while not self._is_ending:
            if num_failed:
                await asyncio.sleep(min(_RETRY_S * 2 ** (num_failed - 1), _MAX_RETRY_S))
            await self._engine_up.wait()
            if self._is_ending:
                return
            try:
                child = self._children[slot] = await self._start(slot)
            except SettingError as error:  # no memory or descriptors: may be temporary
                self._log.error("the API process cannot be replaced", reason=str(error))
                num_failed += 1
                continue
            if self._is_ending:
                child.order(STOP)
            return

    @property
    def _is_ending(self) -> bool:
        return self._stopped.is_set() or self._died.is_set()

    async def _follow(self, child: _Worker) -> None:
        """Read the reports of a process until it ends."""
        assert child.process.stdout is not None, "created with a pipe"
        async for line in child.process.stdout:
            for what, value in json.loads(line).items():
                if what == SERVES:
                    child.serves.set_result(value)
                    pid = child.process.pid
                    self._log.event("an API process serves", process=child.number, pid=pid)
                elif what == FAILED:
                    child.fault = Fault(kind=value[0], message=value[1])
                    self._log.error("an API process cannot serve", reason=value[1])
                elif what == STALLED:
                    self._end_stalled(Path(value[0]), value[1])

    def _forget(self, child: _Worker) -> None:
        """Remove a process that has ended; the engine ends its requests."""
        socket_path(self._home, child.number).unlink(missing_ok=True)
        forget_process(self._counts, child.process.pid)
        if self._ready is not None:
            self._link.send(Leave(client=child.number))

    def _give_up(self, child: _Worker, reason: str) -> None:
        """Fail: one of the first processes did not start, and a replacement would not either."""
        early = fault_of(WorkerError(f"an API process {reason} before it served"))
        self._fault = self._fault or child.fault or early
        self._unable.set()

    def _order_all(self, order: str) -> None:
        for child in self._children.values():
            child.order(order)

    async def _until_gone(self, limit_s: float) -> None:
        ends = [asyncio.ensure_future(child.process.wait()) for child in self._children.values()]
        try:
            if ends:
                await asyncio.wait(ends, timeout=limit_s)
        finally:
            for end in ends:
                end.cancel()

    async def _end_children(self) -> None:
        """End the remaining processes at once: close their standard input, then kill them."""
        for child in self._children.values():
            assert child.process.stdin is not None, "created with a pipe"
            child.process.stdin.close()
        await self._until_gone(_SHUTDOWN_S)
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()

    # ---- messages of the engine, and signals

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._ready = message
            self._engine_loaded.set()
            for child in self._children.values():
                if child.process.returncode is None:
                    self._link.send(Join(client=child.number))
        elif isinstance(message, Loading):
            self._on_loading(message.done_bytes, message.total_bytes)
        elif isinstance(message, Failed):
            if self._restarts is None or not self._announced:
                self._die(message.fault)
            self._failure = message.fault.message

    def _on_end(self, reason: str) -> None:
        failure = self._engine.failure().hex()
        if self._restarts is None or not self._announced:
            self._die(fault_of(WorkerError(reason)))
        elif self._engine_up.is_set():
            self._engine_up.clear()
            self._restarting = asyncio.ensure_future(self._keep_engine(self._failure or reason))
        else:  # while it was started again
            self._engine_ended.set()
        self._order_all(f"{ENGINE_ENDED} {self._engine.wait(0)} {failure}")

    # ---- a supervised engine

    async def _keep_engine(self, reason: str) -> None:
        try:
            await self._restart(reason)
        except Exception as error:  # a bug: end the server rather than leave it without an engine
            self._die(fault_of(error))
            raise

    async def _restart(self, reason: str) -> None:
        """Start engines until one is ready, or end the server where the limit is reached."""
        assert self._restarts is not None, "it is supervised"
        self._log.error("the engine died and is restarted", reason=reason)
        while True:
            self._ready = None
            await self._link.close()
            delay_s = self._restarts.next_delay_s(Clock().now_ms() / 1000.0)
            if delay_s is None:
                break
            await asyncio.sleep(delay_s)
            if await self._start_engine():
                self._restarts.served(Clock().now_ms() / 1000.0)
                self._engine_up.set()
                num_restarts = self._restarts.num_total
                self._log.event("the engine was restarted", restarts=num_restarts)
                self._order_all(f"{ENGINE_STARTED} {num_restarts} {self._engine.folder}")
                return
            reason = self._failure or "it ended while it was starting"
            self._log.error("the engine cannot be restarted", reason=reason)
        message = self._restarts.given_up()
        self._die(fault_of(WorkerError(message)))
        self._engine_up.set()  # processes that wait for it see that the server ends
        self._order_all(f"{ENGINE_LOST} {message.encode().hex()}")

    async def _start_engine(self) -> bool:
        """Start an engine and wait until it is ready or has ended."""
        self._failure, self._engine_ended = "", asyncio.Event()
        try:
            self._engine = EngineProcess.launch(self._config, self._server.logging)
        except SettingError as error:
            self._failure = str(error)
            return False
        self._link = ProcessLink(self._engine)
        self._engine_loaded = asyncio.Event()
        self._link.open(asyncio.get_running_loop(), self._on_message, self._on_end)
        ends = [
            asyncio.ensure_future(event.wait())
            for event in (self._engine_loaded, self._engine_ended)
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return not self._engine_ended.is_set()

    def _end_stalled(self, folder: Path, reason: str) -> None:
        """End an engine that makes no progress, unless it was replaced in the meantime."""
        if folder == self._engine.folder and self._engine_up.is_set():
            self._log.error("the engine makes no progress", reason=reason)
            self._failure = reason
            self._engine.kill()

    def _die(self, fault: Fault) -> None:
        self._fault = self._fault or fault
        self._died.set()

    def _on_signal(self, number: int) -> None:
        if self._stopped.is_set():
            os._exit(128 + number)  # all others end too: their standard input closes
        self._stopped.set()


def _exit_text(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
