"""The keeper of several API processes: it starts them, tells them when to end, replaces them.

    exit_code = keep(engine, config, server, listening, log, announce=print_block)

Serves nothing and reads no request. All wait at the one listening socket, which they inherit, so
whoever is free takes a connection, and none waits for a process that is gone. One that ends by
itself is told to the engine, which ends what it had asked for, and another takes its place under a
new number. SIGTERM or SIGINT: all drain; a second signal ends everything at once. SIGHUP: all read
the tenants file again. The engine's death ends all. Always holds: each wait after the end has begun
has a limit; where this process ends, however it does, all others do.
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
from typing import Any, Literal

from quire.api.workers.worker_job import (
    ENGINE_ENDED,
    FAILED,
    REREAD,
    SERVES,
    STOP,
    WorkerJob,
    job_line,
    socket_path,
)
from quire.base.errors import QuireError, SettingError, WorkerError
from quire.base.log import Log
from quire.config.groups import EngineConfig, ServerConfig
from quire.engine.client.launch import (
    EngineProcess,
    command_of,
    config_to_json,
    environment_of_ours,
)
from quire.engine.client.process_link import ProcessLink
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
from quire.obs.shared import forget_process, share_counts

EXIT_DONE = 0
EXIT_FAILED = 1
# Beyond the grace time: last words to callers, connections that close.
_LAST_S = 10.0
# A replacement that ends before it serves is followed by the next after so long, then twice that.
_RETRY_S = 0.5
_MOST_RETRY_S = 30.0
_COUNTS = "counts"


@dataclass(slots=True, eq=False)
class _Worker:
    """One API process. serves: set once it does, to the problems of the model's chat templates.
    fault: why it says that it cannot."""

    number: int
    process: asyncio.subprocess.Process
    serves: asyncio.Future[list[str]]
    fault: Fault | None = None

    def order(self, word: str) -> None:
        """Tell it; one that is gone does not hear it."""
        assert self.process.stdin is not None, "it was asked for a pipe"
        with suppress(OSError, RuntimeError):
            self.process.stdin.write(word.encode() + b"\n")


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
    """Serve until told to stop; the exit code.

    announce: called with what the engine told and the templates' problems once all of them take
    requests. Raises what kept the engine, or the first of the processes, from starting.
    """
    keeper = _Supervisor(engine, config, server, listening, for_admins, log, on_loading)
    return asyncio.run(keeper.run(announce))


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
        self._counts = engine.folder / _COUNTS
        self._children: dict[int, _Worker] = {}  # by slot
        self._num_started = 0
        self._ready: Ready | None = None
        self._fault: Fault | None = None
        self._announced = False
        share_counts(self._counts)
        from quire.obs.metrics import restarts_counter  # behind what says where counts are kept

        self._restarts = restarts_counter()

    async def run(self, announce: Callable[[Ready, Sequence[str]], None]) -> int:
        self._stopped, self._died, self._unable = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._order_all, REREAD)
        self._link.open(loop, self._on_message, self._on_end)
        keeping: list[asyncio.Future[None]] = []
        try:
            for slot in range(self._num):
                self._children[slot] = await self._start(slot)
            keeping = [asyncio.ensure_future(self._kept(slot)) for slot in self._children]
            return await self._serve(announce)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            await self._end_children()
            await self._link.close()

    async def _serve(self, announce: Callable[[Ready, Sequence[str]], None]) -> int:
        serving = asyncio.ensure_future(self._all_serve())
        ends = [
            asyncio.ensure_future(event.wait())
            for event in (self._stopped, self._died, self._unable)
        ]
        stopped, died, unable = ends
        try:
            await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not (died.done() or unable.done()):
                problems = serving.result()
                assert self._ready is not None, "the processes serve only then"
                self._announced = True
                announce(self._ready, problems)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if unable.done():
                    raise self._reason
            elif stopped.done():
                self._log.event("stopped while the model was loading")
                return EXIT_DONE
            else:
                raise self._reason
            return await self._drained(died) if stopped.done() else await self._buried()
        finally:
            for task in (serving, *ends):
                task.cancel()
            await asyncio.gather(serving, *ends, return_exceptions=True)

    async def _all_serve(self) -> list[str]:
        """Until all of the first processes take requests."""
        told = [await child.serves for child in list(self._children.values())]
        return told[0]

    async def _drained(self, died: asyncio.Task[Literal[True]]) -> int:
        """Each process drains and leaves; those that are left take whoever comes meanwhile."""
        self._log.event("draining", grace_s=self._server.grace_s, api_processes=self._num)
        if self._for_admins is not None:
            self._for_admins.close()  # nobody listens there when its process has left
        self._order_all(STOP)
        gone = asyncio.ensure_future(self._until_gone(self._server.grace_s + _LAST_S))
        both: set[asyncio.Future[Any]] = {gone, died}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            gone.cancel()
            return await self._buried()
        self._log.event("stopped")
        return EXIT_DONE

    async def _buried(self) -> int:
        """The engine is dead: the processes tell their callers, and end."""
        assert self._fault is not None, "there is a reason"
        self._log.error("the engine is dead; the server ends", reason=self._fault.message)
        await self._until_gone(_LAST_S)
        return EXIT_FAILED

    @property
    def _reason(self) -> QuireError:
        assert self._fault is not None, "there is one"
        return error_of(self._fault)

    # ---- the processes

    async def _start(self, slot: int) -> _Worker:
        self._num_started += 1
        number, listening = self._num_started, self._listening
        admins = self._for_admins if slot == 0 else None
        job = WorkerJob(
            number=number,
            folder=str(self._engine.folder),
            counts=str(self._counts),
            listening=listening.fileno(),
            admins=None if admins is None else admins.fileno(),
            sees_steps=slot == 0,
            replaces=number > self._num,
            server=asdict(self._server),
            engine=config_to_json(self._config),
        )
        if self._ready is not None:
            self._link.send(Join(client=number))
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
        assert process.stdin is not None, "it was asked for a pipe"
        process.stdin.write(job_line(job))
        return child

    async def _kept(self, slot: int) -> None:
        try:
            await self._keep(slot)
        except Exception as error:  # a fault of ours: better no server than half of one
            self._fault = self._fault or fault_of(error)
            self._unable.set()
            raise

    async def _keep(self, slot: int) -> None:
        """Have a process in this place, until the end."""
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
                "an API process ended; another takes its place", process=child.number, reason=reason
            )
            self._restarts.inc()
            num_failed = 0 if child.serves.done() else num_failed + 1
            await self._replace(slot, num_failed)

    async def _replace(self, slot: int, num_failed: int) -> None:
        """Start another in this place; later, where those before it did not come up."""
        while not self._is_ending:
            if num_failed:
                await asyncio.sleep(min(_RETRY_S * 2 ** (num_failed - 1), _MOST_RETRY_S))
            try:
                child = self._children[slot] = await self._start(slot)
            except SettingError as error:  # no memory, no descriptors: that may pass
                self._log.error("no API process takes its place", reason=str(error))
                num_failed += 1
                continue
            if self._is_ending:
                child.order(STOP)
            return

    @property
    def _is_ending(self) -> bool:
        return self._stopped.is_set() or self._died.is_set()

    async def _follow(self, child: _Worker) -> None:
        """Hear what a process reports, until it reports no more."""
        assert child.process.stdout is not None, "it was asked for a pipe"
        async for line in child.process.stdout:
            for what, value in json.loads(line).items():
                if what == SERVES:
                    child.serves.set_result(value)
                    pid = child.process.pid
                    self._log.event("an API process serves", process=child.number, pid=pid)
                elif what == FAILED:
                    child.fault = Fault(kind=value[0], message=value[1])
                    self._log.error("an API process cannot serve", reason=value[1])

    def _forget(self, child: _Worker) -> None:
        """It is gone: the engine ends what it asked for, the others no longer look for it."""
        socket_path(self._engine.folder, child.number).unlink(missing_ok=True)
        forget_process(self._counts, child.process.pid)
        if self._ready is not None:
            self._link.send(Leave(client=child.number))

    def _give_up(self, child: _Worker, reason: str) -> None:
        """One of the first does not come up: nor would another in its place."""
        early = fault_of(WorkerError(f"an API process {reason} before it served"))
        self._fault = self._fault or child.fault or early
        self._unable.set()

    def _order_all(self, word: str) -> None:
        for child in self._children.values():
            child.order(word)

    async def _until_gone(self, limit_s: float) -> None:
        ends = [asyncio.ensure_future(child.process.wait()) for child in self._children.values()]
        try:
            if ends:
                await asyncio.wait(ends, timeout=limit_s)
        finally:
            for end in ends:
                end.cancel()

    async def _end_children(self) -> None:
        """Whoever is still there ends at once: its standard input does."""
        for child in self._children.values():
            assert child.process.stdin is not None, "it was asked for a pipe"
            child.process.stdin.close()
        await self._until_gone(_LAST_S)
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()

    # ---- what comes from the engine, and from the system

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Ready):
            self._ready = message
            for child in self._children.values():
                self._link.send(Join(client=child.number))
        elif isinstance(message, Loading):
            self._on_loading(message.done_bytes, message.total_bytes)
        elif isinstance(message, Failed):
            self._die(message.fault)

    def _on_end(self, reason: str) -> None:
        self._die(fault_of(WorkerError(reason)))
        failure = self._engine.failure().hex()
        self._order_all(f"{ENGINE_ENDED} {self._engine.wait(0)} {failure}")

    def _die(self, fault: Fault) -> None:
        self._fault = self._fault or fault
        self._died.set()

    def _on_signal(self, number: int) -> None:
        if self._stopped.is_set():
            os._exit(128 + number)  # all others end with us: their standard input closes
        self._stopped.set()


def _exit_text(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"ended with exit code {exit_code}"
