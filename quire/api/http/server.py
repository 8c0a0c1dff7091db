"""One server process's life: load, serve, drain, end; with an exit code and never a hang.

    exit_code = run(engine, config, listening, log, announce=print_block)

While the engine starts, /health says so and requests get 503. SIGTERM or SIGINT: nothing new is
taken (503), what is open may finish for grace_s, then gets an error; exit 0. A second signal exits
at once. SIGHUP: what may change meanwhile is read again (reread.py). The engine's death: every
open stream gets an error event, /health says "dead" for a moment, exit 1. One of several API
processes is told these things by its keeper, not by signals. Knows no route. Always holds: each
wait after the end has begun has a limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire.api.admin.reload import Reloader, sources_of
from quire.api.app import build_admin_app, build_app
from quire.api.http.connection import Connection
from quire.api.http.sockets import tls_context
from quire.api.http.tls import TlsListener
from quire.api.server_state import Engine, ServerState
from quire.api.workers.private_app import build_private_app
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.log import Log
from quire.config.groups import ServerConfig
from quire.config.tenants import Tenant
from quire.obs.metrics import Metrics

EXIT_DONE = 0
EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Open requests are given so long to write their last words once they have been told to end.
_LAST_WORDS_S = 3.0
# After the engine's death /health answers for so long, so that whoever watches sees why.
_LINGER_S = 1.0
# Threads for what would hold up the event loop: large bodies, long prompts (lanes.py has others).
_NUM_THREADS = 4
# After so long a thread lets go of the interpreter lock to another that wants it. Python's 5 ms,
# several times in each turn of the event loop, are felt in every stream while a template renders.
_SWITCH_S = 0.0005


class Seat(Protocol):
    """One API process's place among several, as quire.api.workers.worker has it. folder: of what
    they share. sees_steps: whether this one observes the engine's steps. replaces: it comes in the
    place of another, so callers wait for it rather than being told that it loads."""

    folder: Path
    peers: SiblingWorkers
    sees_steps: bool
    replaces: bool

    def follow(self, *, stop: Callable[[], None], reread: Callable[[], None]) -> None:
        """Call these in the event loop when the keeper says so."""


class StartingEngine(Engine, Protocol):
    """An engine that is being started, and is closed by us."""

    async def ready(self) -> None: ...

    async def close(self) -> None: ...


def run(
    engine: StartingEngine,
    config: ServerConfig,
    listening: socket.socket,
    log: Log,
    *,
    announce: Callable[[], None],
    for_admins: socket.socket | None = None,
    tenants: Sequence[Tenant] | None = None,
    read_tenants: Callable[[], Sequence[Tenant]] | None = None,
    tenants_file: str | None = None,
    seat: Seat | None = None,
) -> int:
    """Serve until told to stop; the exit code. `announce` is called when requests are taken.

    for_admins: the socket of --admin-port. read_tenants: reads the tenants anew, where there is a
    file of them: tenants_file, which is looked at every few seconds. seat: this process's among
    several.

    Raises what kept the engine from starting.
    """
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        life = _Life(engine, config, log, announce, tenants, read_tenants, tenants_file, seat)
        return runner.run(life.run(listening, for_admins))


class _Life:
    def __init__(
        self,
        engine: StartingEngine,
        config: ServerConfig,
        log: Log,
        announce: Callable[[], None],
        tenants: Sequence[Tenant] | None,
        read_tenants: Callable[[], Sequence[Tenant]] | None,
        tenants_file: str | None,
        seat: Seat | None,
    ) -> None:
        self._engine = engine
        self._seat = seat
        self._config = config
        self._log = log
        self._announce = announce
        self._tenants = tenants
        self._read_tenants = read_tenants
        self._tenants_file = tenants_file

    async def run(self, listening: socket.socket, for_admins: socket.socket | None) -> int:
        self._stop, self._opened = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "quire-edge"))
        serving = self._new_serving()

        servers: list[tuple[_Server, socket.socket]] = [(_server(serving), listening)]
        if for_admins is not None:
            servers.append((_admin_server(serving), for_admins))
        if self._seat is not None:
            peers = self._seat.peers
            servers.append((_private_server(serving, peers), peers.listen()))
        rereader = self._rereader(serving, [server for server, _ in servers])
        self._obey(loop, rereader.all)
        rereader.watch()
        if self._seat is None or not self._seat.replaces:
            self._opened.set()
        http = asyncio.ensure_future(_serve_all(servers, self._opened))
        try:
            return await self._serve(serving, http)
        finally:
            rereader.close()
            for server, _ in servers:
                server.should_exit = True
            self._opened.set()
            await asyncio.wait({http}, timeout=_LAST_WORDS_S)
            serving.lanes.close()
            await self._engine.close()
            http.cancel()

    def _obey(self, loop: asyncio.AbstractEventLoop, reread: Callable[[], None]) -> None:
        if self._seat is not None:
            self._seat.follow(stop=self._stop.set, reread=reread)
            return
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, reread)

    def _rereader(self, serving: ServerState, servers: Sequence[_Server]) -> Reloader:
        sources = sources_of(
            serving,
            read_tenants=self._read_tenants,
            tenants_file=self._tenants_file,
            contexts=[server.tls for server in servers if server.tls is not None],
        )
        return Reloader(self._log, sources)

    def _new_serving(self) -> ServerState:
        names = [tenant.name for tenant in self._tenants or ()]
        if self._seat is None:
            return ServerState(self._config, Metrics(names), self._log, self._tenants)
        metrics = Metrics(names, shared=self._seat.folder, sees_steps=self._seat.sees_steps)
        return ServerState(self._config, metrics, self._log, self._tenants, self._seat.peers)

    async def _serve(self, serving: ServerState, http: asyncio.Future[None]) -> int:
        stopped = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._engine.ready())
        died = asyncio.ensure_future(self._engine.dead.wait())
        tasks = (stopped, starting, died)
        try:
            await _first(stopped, starting, http)
            if not starting.done():
                self._log.event("stopped while the model was loading")
                return EXIT_FAILED if http.done() else EXIT_DONE
            starting.result()
            if self._seat is not None:
                await self._seat.peers.catch_up(serving)
            serving.start(self._engine)
            self._opened.set()
            self._announce()
            await _first(stopped, died, http)
            if died.done():
                return await self._buried(serving)
            if http.done():
                self._log.error("the HTTP server ended by itself")
                return EXIT_FAILED
            return await self._drained(serving, died)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drained(self, serving: ServerState, died: asyncio.Future[Any]) -> int:
        """Let open requests finish within the grace time, then end them."""
        serving.drain()
        self._log.event("draining", grace_s=self._config.grace_s)
        idle = asyncio.ensure_future(serving.idle.wait())
        await _first(idle, died, timeout_s=self._config.grace_s)
        if died.done():
            idle.cancel()
            return await self._buried(serving)
        if not idle.done():
            self._log.warning("grace time is over; open requests are ended")
            serving.end_all()
            await _first(idle, timeout_s=_LAST_WORDS_S)
        idle.cancel()
        self._log.event("stopped")
        return EXIT_DONE

    async def _buried(self, serving: ServerState) -> int:
        """The engine is dead: open streams learn it from their generators."""
        reason = self._engine.health().reason
        self._log.error("the engine is dead; the server ends", reason=reason)
        idle = asyncio.ensure_future(serving.idle.wait())
        await _first(idle, timeout_s=_LAST_WORDS_S)
        idle.cancel()
        serving.end_all()
        await asyncio.sleep(_LINGER_S)
        return EXIT_FAILED

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)  # the engine process ends with us: its standard input closes
        self._stop.set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling and TLS: what a signal means is decided here.

    is_private: only other processes of this server can reach it. tls: the context of HTTPS.
    """

    is_private = False
    tls: ssl.SSLContext | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with TLS where there is a context."""
        if self.tls is None or not sockets:
            await super().startup(sockets)
            return
        await self.lifespan.startup()

        def made() -> Connection:
            state = self.lifespan.state
            return Connection(config=self.config, server_state=self.server_state, app_state=state)

        self.servers = [TlsListener(at, self.tls, made) for at in sockets]  # type: ignore[misc]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_all(
    servers: Sequence[tuple[_Server, socket.socket]], opened: asyncio.Event
) -> None:
    """Run all of them until they are told to exit, or one ends by itself. opened: before it only
    private ones are served."""

    async def serve(server: _Server, at: socket.socket) -> None:
        if not server.is_private:
            await opened.wait()
        await server.serve(sockets=[at])

    running = [asyncio.ensure_future(serve(server, at)) for server, at in servers]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*running)


def _server(serving: ServerState) -> _Server:
    server = _serves(build_app(serving), serving)
    if serving.config.tls_cert is not None:
        server.tls = tls_context(serving.config)
    return server


def _admin_server(serving: ServerState) -> _Server:
    """Plain HTTP: who asks does so on this machine, by an address that no certificate names."""
    return _serves(build_admin_app(serving), serving)


def _private_server(serving: ServerState, peers: SiblingWorkers) -> _Server:
    """Plain HTTP at a private socket."""
    server = _serves(build_private_app(serving, peers), serving)
    server.is_private = True
    return server


def _serves(app: ASGIApp, serving: ServerState) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=serving.config.keep_alive_s,  # type: ignore[arg-type]  # a timer's
            timeout_graceful_shutdown=1,
        )
    )


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(set(futures), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
