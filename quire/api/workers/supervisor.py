"""Supervise several API processes: start them, stop them, replace those that end.

    exit_code = supervise(engines, server, listening, log, announce=print_block)

The supervisor serves no request. All processes inherit one listening socket, so an idle one accepts
a connection, and none waits for a process that has ended. When one ends by itself, the engines are
notified and end its requests, and another replaces it under a new number. SIGTERM or SIGINT: all
drain; a second signal ends everything at once. SIGHUP: all reload their files. If the last engine
dies, all end; with --restart-engine it is started again (engine_supervisor.py), and all continue
with the next one. Always holds: each wait during shutdown has a limit; when this process ends, in
any way, all others do.
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
from quire.api.workers import process_beats
from quire.api.workers.engine_supervisor import EngineSupervisor
from quire.api.workers.worker_job import (
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
from quire.base.errors import QuireError, SettingError, WorkerError
from quire.base.log import Log
from quire.config.groups import EngineConfig
from quire.config.server_config import ServerConfig
from quire.engine.client.launch import EngineProcess
from quire.engine.client.socket_directory import SocketDirectory
from quire.engine.data_parallel.shared_routing import SharedRouting, create_shared_routing
from quire.engine.data_parallel.sums import notes_of, sum_of_cards
from quire.engine.model_card import ModelCard
from quire.engine.process.messages import Fault, error_of, fault_of
from quire.engine.supervised.restarts import Restarts
from quire.obs.shared import forget_process, share_counts

EXIT_DONE = 0
EXIT_FAILED = 1
# Beyond the grace time: last events, and connections that close.
_SHUTDOWN_S = 10.0
# The delay before the next replacement of one that ended before it served; it doubles.
_RETRY_S = 0.5
_MAX_RETRY_S = 30.0
_COUNTS, _ROUTING = "counts", "routing"

Announce = Callable[[ModelCard, Sequence[str], Sequence[str] | None], None]


@dataclass(slots=True, eq=False)
class _Worker:
    """One API process. serves: set when it serves, to the problems of the chat templates, if any.
    fault: the reason it reported for failing."""

    number: int
    slot: int
    process: asyncio.subprocess.Process
    serves: asyncio.Future[list[str] | None]
    fault: Fault | None = None

    def order(self, order: str) -> None:
        """Send an order; no effect if the process has ended."""
        assert self.process.stdin is not None, "created with a pipe"
        with suppress(OSError, RuntimeError):
            self.process.stdin.write(order.encode() + b"\n")


def supervise(
    engines: Sequence[tuple[EngineConfig, EngineProcess]],
    server: ServerConfig,
    listening: socket.socket,
    log: Log,
    *,
    announce: Announce,
    for_admins: socket.socket | None = None,
    on_loading: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> int:
    """Serve until stopped; return the exit code.

    announce: called with the card of all engines, their notes and the problems of the templates
    once all processes serve. Raises what kept an engine, or one of the first processes, from
    starting.
    """
    supervisor = _Supervisor(engines, server, listening, for_admins, log, on_loading)
    return asyncio.run(supervisor.run(announce))


class _Supervisor:
    def __init__(
        self,
        engines: Sequence[tuple[EngineConfig, EngineProcess]],
        server: ServerConfig,
        listening: socket.socket,
        for_admins: socket.socket | None,
        log: Log,
        on_loading: Callable[[int, int], None],
    ) -> None:
        self._server = server
        self._listening = listening
        self._num = server.api_processes
        self._for_admins = for_admins
        self._log = log
        self._on_loading = on_loading
        self._engines = [
            EngineSupervisor(
                number,
                process,
                config,
                server.logging,
                log,
                self,
                Restarts(server.restart_limit) if server.restart_engine else None,
            )
            for number, (config, process) in enumerate(engines)
        ]
        # The directory of the only engine may be ours too, unless another engine follows it.
        is_own = server.restart_engine or len(engines) > 1
        self._own_home = SocketDirectory() if is_own else None
        self._home = self._engines[0].folder if self._own_home is None else self._own_home.path
        self._routing = self._new_routing()
        self._counts = self._home / _COUNTS
        self._children: dict[int, _Worker] = {}  # by slot
        self._num_started = 0
        self._fault: Fault | None = None
        self.announced = False
        share_counts(self._counts)
        # Imported after share_counts, which sets where counts are kept.
        from quire.obs.series import restarts_counter

        self._replaced = restarts_counter()

    def _new_routing(self) -> SharedRouting | None:
        """Make what API processes choose engines by; None for one engine."""
        if len(self._engines) == 1:
            return None
        path, num_engines = self._home / _ROUTING, len(self._engines)
        create_shared_routing(path, num_processes=self._num, num_engines=num_engines)
        return SharedRouting(path, 0)

    async def run(self, announce: Announce) -> int:
        self._stopped, self._died, self._unable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._any_engine = asyncio.Event()
        self._any_engine.set()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.order_all, RELOAD)
        for engine in self._engines:
            engine.open()
        tasks: list[asyncio.Future[None]] = []
        try:
            for slot in range(self._num):
                self._children[slot] = await self._start(slot)
            tasks = [asyncio.ensure_future(self._supervise_slot(slot)) for slot in self._children]
            return await self._serve(announce)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_children()
            await asyncio.gather(*(engine.close() for engine in self._engines))
            if self._own_home is not None:
                self._own_home.remove()

    async def _serve(self, announce: Announce) -> int:
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
                ready = [engine.ready for engine in self._engines if engine.ready is not None]
                self.announced = True
                announce(
                    sum_of_cards([one.card for one in ready]),
                    notes_of([one.notes for one in ready]),
                    problems,
                )
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

    async def _all_serve(self) -> list[str] | None:
        """Wait until all first processes serve; return the problems of the templates, if any."""
        problems = [await child.serves for child in list(self._children.values())]
        return problems[0]

    async def _drain(self, died: asyncio.Task[Literal[True]]) -> int:
        """Let each process drain and end; the remaining ones accept connections meanwhile."""
        notify(STOPPING)
        self._log.event("draining", grace_s=self._server.grace_s, api_processes=self._num)
        if self._for_admins is not None:
            self._for_admins.close()  # its process is about to end
        self.order_all(STOP)
        gone = asyncio.ensure_future(self._until_gone(self._server.grace_s + _SHUTDOWN_S))
        both: set[asyncio.Future[Any]] = {gone, died}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            gone.cancel()
            return await self._end_after_engine_death()
        self._log.event("stopped")
        return EXIT_DONE

    async def _end_after_engine_death(self) -> int:
        """Wait until the processes have reported the last engine's death to their clients and
        ended."""
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
        # The engines as they are now: from here on this process gets the orders about them.
        job = WorkerJob(
            number=number,
            slot=slot,
            home=str(self._home),
            engines=[job for engine in self._engines if (job := engine.job()) is not None],
            routing="" if self._routing is None else str(self._home / _ROUTING),
            counts=str(self._counts),
            listening=listening.fileno(),
            admins=None if admins is None else admins.fileno(),
            replaces=number > self._num,
            server=asdict(self._server),
        )
        child = _Worker(number, slot, process, asyncio.get_running_loop().create_future())
        assert process.stdin is not None, "created with a pipe"
        process.stdin.write(job_line(job))
        for engine in self._engines:
            engine.join(number, process.pid)  # else it joins with the others
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
            if not self.announced:
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
            await self._any_engine.wait()
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
                    for engine in self._engines:
                        if engine.folder == Path(value[0]):
                            engine.end_stalled(value[1])

    def _forget(self, child: _Worker) -> None:
        """Remove a process that has ended; the engines end its requests."""
        socket_path(self._home, child.number).unlink(missing_ok=True)
        process_beats.forget_process(self._home, child.slot)
        forget_process(self._counts, child.process.pid)
        if self._routing is not None:
            self._routing.forget_process(child.slot)
        for engine in self._engines:
            engine.leave(child.number)

    def _give_up(self, child: _Worker, reason: str) -> None:
        """Fail: one of the first processes did not start, and a replacement would not either."""
        early = fault_of(WorkerError(f"an API process {reason} before it served"))
        self._fault = self._fault or child.fault or early
        self._unable.set()

    def order_all(self, order: str) -> None:
        """See Owner."""
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

    # ---- the engines, and signals

    def engine_ready(self, engine: EngineSupervisor) -> None:
        """See Owner."""
        for child in self._children.values():
            if child.process.returncode is None:
                engine.join(child.number, child.process.pid)

    def engine_loading(self) -> None:
        """See Owner."""
        done, total = zip(*(engine.loaded for engine in self._engines), strict=True)
        self._on_loading(sum(done), sum(total))

    def engine_changed(self, engine: EngineSupervisor) -> None:
        """See Owner. Until the server is announced, it needs all engines; then, one."""
        if any(one.is_there for one in self._engines):
            self._any_engine.set()
        else:
            self._any_engine.clear()
        if engine.fault is None:
            return
        left = sum(one.fault is None for one in self._engines)
        if not left or not self.announced:
            self._die(engine.fault)
        else:
            self._log.error(
                "an engine is gone", engine=engine.number, reason=engine.fault.message, left=left
            )

    def _die(self, fault: Fault) -> None:
        self._fault = self._fault or fault
        self._died.set()
        self._any_engine.set()  # what waits for one sees that the server ends

    def _on_signal(self, number: int) -> None:
        if self._stopped.is_set():
            os._exit(128 + number)  # all others end too: their standard input closes
        self._stopped.set()


def _exit_text(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
