"""The lifecycle of one server process: load, serve, drain, exit with a code.

    exit_code = run(engine, config, listening, log, announce=print_block)

While the engine starts, /health reports it and requests get 503. SIGTERM or SIGINT: new requests
get 503, open ones may finish for grace_s, then get an error; exit 0. A second signal exits at once.
SIGHUP: reload files (admin/reload.py). If the engine dies, every open stream gets an error event,
/health reports "dead" for a moment, exit 1. One of several API processes gets these orders from its
supervisor, not from signals. Wires the HTTP server and the dialects; knows no route. Always holds:
each wait during shutdown has a limit.
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
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire.api.admin.reload import Reloader, sources_of
from quire.api.app import DEFAULT_DIALECT, build_admin_app, build_app
from quire.api.draining import LAST_EVENTS_S, drain, end_streams_of_dead_engine
from quire.api.engine_protocol import StartingEngine
from quire.api.http.connection import Connection, max_connections
from quire.api.http.refusal import refusal_of_http
from quire.api.http.sockets import tls_context
from quire.api.http.tls import TlsListener
from quire.api.request_spans import open_spans
from quire.api.rpc_wiring import open_rpc
from quire.api.server_state import ServerState
from quire.api.service_manager import READY, STOPPING, notify, send_watchdog
from quire.api.workers.private_app import build_private_app
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.heap import freeze_heap
from quire.base.http_apis import PROCESS_HEADER
from quire.base.log import Log
from quire.base.waiting_connections import WaitingConnections
from quire.config.server_config import ServerConfig
from quire.config.tenants import Tenant
from quire.obs.metrics import Metrics

EXIT_DONE = 0
EXIT_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time that /health still answers after the engine's death, so that a monitor sees the reason.
_LINGER_S = 1.0
# Threads for large bodies and long prompts; server_state.ThreadPools has others.
_NUM_THREADS = 4
# With room for fewer connections a warning is logged: most systems allow 1,024 open files or more.
_FEW_CONNECTIONS = 900
# The interval after which a thread releases the interpreter lock to another. Python's default of
# 5 ms, several times in each iteration of the event loop, delays every stream during a rendering.
_SWITCH_S = 0.0005


class WorkerContext(Protocol):
    """The context of one of several API processes (quire.api.workers.worker). folder: of shared
    metrics. sees_steps: whether this one observes the engine's steps. replaces: it replaces
    another, so clients wait until it is ready instead of getting 503."""

    folder: Path
    siblings: SiblingWorkers
    sees_steps: bool
    replaces: bool

    def follow(self, *, stop: Callable[[], None], reload: Callable[[], None]) -> None:
        """Call these in the event loop when the supervisor orders it."""


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
    worker: WorkerContext | None = None,
) -> int:
    """Serve until stopped; return the exit code. `announce` is called once requests are accepted.

    for_admins: the socket of --admin-port. read_tenants: reads tenants_file again, which is checked
    for changes every few seconds. worker: the context of one of several API processes.

    Raises what kept the engine from starting.
    """
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = ServerProcess(
            engine, config, log, announce, tenants, read_tenants, tenants_file, worker
        )
        return runner.run(process.run(listening, for_admins))


class ServerProcess:
    def __init__(
        self,
        engine: StartingEngine,
        config: ServerConfig,
        log: Log,
        announce: Callable[[], None],
        tenants: Sequence[Tenant] | None,
        read_tenants: Callable[[], Sequence[Tenant]] | None,
        tenants_file: str | None,
        worker: WorkerContext | None,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._config = config
        self._log = log
        self._announce = announce
        self._tenants = tenants
        self._read_tenants = read_tenants
        self._tenants_file = tenants_file

    async def run(self, listening: socket.socket, for_admins: socket.socket | None) -> int:
        self._stop, self._opened = asyncio.Event(), asyncio.Event()
        if self._worker is None or self._worker.sees_steps:  # once a server
            warn_of_few_connections(self._log)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "quire-edge"))
        server_state = self._new_state()
        self._rpc = open_rpc(server_state, self._log)
        spans = open_spans(server_state, self._config, self._log, os.environ)
        if spans is not None:
            server_state.on_begin, server_state.requests.on_end = spans.begin, spans.ended
        siblings = None if self._worker is None else self._worker.siblings

        servers: list[tuple[_Server, socket.socket]] = [
            (public_server(server_state, siblings), listening)
        ]
        if for_admins is not None:
            servers.append((_admin_server(server_state, siblings), for_admins))
        if siblings is not None:
            servers.append((_private_server(server_state, siblings), siblings.listen()))
        reloader = self._new_reloader(server_state, [server for server, _ in servers])
        self._follow_orders(loop, reloader.all)
        reloader.watch()
        if self._worker is None or not self._worker.replaces:
            self._opened.set()
        http = asyncio.ensure_future(_serve_all(servers, self._opened))
        try:
            return await self._serve(server_state, http)
        finally:
            reloader.close()
            if self._rpc is not None:
                await self._rpc.close()
            for server, _ in servers:
                server.should_exit = True
            self._opened.set()
            await asyncio.wait({http}, timeout=LAST_EVENTS_S)
            server_state.closing.close()
            if spans is not None:
                await spans.close()
            await self._engine.close()
            http.cancel()

    def _follow_orders(self, loop: asyncio.AbstractEventLoop, reload: Callable[[], None]) -> None:
        if self._worker is not None:
            self._worker.follow(stop=self._stop.set, reload=reload)
            return
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, reload)

    def _new_reloader(self, server_state: ServerState, servers: Sequence[_Server]) -> Reloader:
        sources = sources_of(
            server_state,
            read_tenants=self._read_tenants,
            tenants_file=self._tenants_file,
            contexts=[server.tls for server in servers if server.tls is not None],
        )
        return Reloader(self._log, sources)

    def _new_state(self) -> ServerState:
        names = [tenant.name for tenant in self._tenants or ()]
        if self._worker is None:
            return ServerState(self._config, Metrics(names), self._log, self._tenants)
        metrics = Metrics(names, shared=self._worker.folder, sees_steps=self._worker.sees_steps)
        return ServerState(self._config, metrics, self._log, self._tenants)

    async def _serve(self, server_state: ServerState, http: asyncio.Future[None]) -> int:
        stopped = asyncio.ensure_future(self._stop.wait())
        starting = asyncio.ensure_future(self._engine.ready())
        died = asyncio.ensure_future(self._engine.dead.wait())
        is_main = self._worker is None  # else its supervisor is the service's process
        watchdog = asyncio.ensure_future(send_watchdog({} if not is_main else os.environ))
        tasks = (stopped, starting, died, watchdog)
        try:
            freeze_heap()  # while the engine loads
            await _first(stopped, starting, http)
            if not starting.done():
                self._log.event("stopped while the model was loading")
                return EXIT_FAILED if http.done() else EXIT_DONE
            starting.result()
            if self._worker is not None:
                await self._worker.siblings.catch_up(server_state)
            server_state.start(self._engine)
            if self._rpc is not None:
                await self._rpc.start()
            self._opened.set()
            self._announce()
            if is_main:
                notify(READY)
            ends: set[asyncio.Future[Any]] = {stopped, died, http}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return await self._end_after_engine_death(server_state)
            if http.done():
                self._log.error("the HTTP server ended by itself")
                return EXIT_FAILED
            return await self._drain(server_state, died)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, server_state: ServerState, died: asyncio.Future[Any]) -> int:
        """Let open requests finish within the grace time, then end them."""
        if self._worker is None:
            notify(STOPPING)
        await drain(server_state, died)
        if died.done():
            return await self._end_after_engine_death(server_state)
        self._log.event("stopped")
        return EXIT_DONE

    async def _end_after_engine_death(self, server_state: ServerState) -> int:
        """End open streams with an error, show the reason for a moment, and exit."""
        reason = self._engine.health().reason
        self._log.error("the engine is dead; the server ends", reason=reason)
        await end_streams_of_dead_engine(server_state)
        await asyncio.sleep(_LINGER_S)
        return EXIT_FAILED

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            os._exit(128 + number)  # the engine process ends too: its standard input closes
        self._stop.set()


def warn_of_few_connections(log: Log) -> None:
    """Log how many connections a low limit on open files leaves room for."""
    if (num_connections := max_connections()) < _FEW_CONNECTIONS:
        log.warning(
            "the limit on open files leaves room for few connections at once, and further clients "
            "are disconnected; raise it before the start, as in `ulimit -n 4096`, or with "
            "LimitNOFILE= in a systemd unit",
            max_connections=num_connections,
        )


# What uvicorn creates for each connection.
_CONNECTION = partial(Connection, dialect=DEFAULT_DIALECT)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling and TLS.

    is_private: only other processes of this server can connect. shares_port: other processes accept
    at the same socket. tls: the context of HTTPS.
    """

    is_private = shares_port = False
    tls: ssl.SSLContext | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with TLS if there is a context."""
        await self.lifespan.startup()
        connect = partial(
            _CONNECTION,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = []
        for at in sockets or ():
            if self.tls is not None:
                refusal = refusal_of_http(DEFAULT_DIALECT)
                self.servers.append(TlsListener(at, self.tls, connect, refusal))  # type: ignore[arg-type]
                continue
            if self.shares_port:  # the first process to wake would take all that wait
                create = asyncio.get_running_loop().create_server
                self.servers.append(await create(connect, sock=at, backlog=self.config.backlog))
                continue
            waiting = WaitingConnections(at, connect, self.server_state.tasks)
            self.servers.append(await waiting.serve(self.config.backlog))
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_all(
    servers: Sequence[tuple[_Server, socket.socket]], opened: asyncio.Event
) -> None:
    """Run all servers until they exit. opened: until it is set only private ones are served."""

    async def serve(server: _Server, at: socket.socket) -> None:
        if not server.is_private:
            await opened.wait()
        # A task of its own: uvicorn wakes it regularly to check `should_exit`.
        await asyncio.ensure_future(server.serve(sockets=[at]))

    running = [asyncio.ensure_future(serve(server, at)) for server, at in servers]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for server, _ in servers:
        server.should_exit = True
    await asyncio.gather(*running)


def public_server(server_state: ServerState, siblings: SiblingWorkers | None = None) -> _Server:
    """Return the server of the public listener."""
    server = new_http_server(build_app(server_state, siblings), server_state, siblings)
    server.shares_port = siblings is not None
    if server_state.config.tls_cert is not None:
        server.tls = tls_context(server_state.config)
    return server


def _admin_server(server_state: ServerState, siblings: SiblingWorkers | None) -> _Server:
    """Return the server of --admin-port: plain HTTP at a loopback address."""
    server = new_http_server(build_admin_app(server_state, siblings), server_state)
    server.shares_port = siblings is not None
    return server


def _private_server(server_state: ServerState, siblings: SiblingWorkers) -> _Server:
    """Return the server of this API process's private socket."""
    app = build_private_app(server_state, siblings, DEFAULT_DIALECT)
    server = new_http_server(app, server_state)
    server.is_private = True
    return server


def new_http_server(
    app: ASGIApp, server_state: ServerState, siblings: SiblingWorkers | None = None
) -> _Server:
    """Return a server of `app` with the bounds on connections, heads and idle time."""
    process = [] if siblings is None else [(PROCESS_HEADER.decode(), str(siblings.number))]
    return _Server(
        uvicorn.Config(
            app,
            http=_CONNECTION,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=process,
            # A timer's seconds, which may be fractions.
            timeout_keep_alive=server_state.config.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=1,
        )
    )


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)
