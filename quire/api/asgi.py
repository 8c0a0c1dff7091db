"""build_asgi: the application of `quire serve` for any ASGI server.

    app = build_asgi("ORG/NAME", max_num_seqs=32, api_key="secret")

The ASGI server runs the app's lifespan: its startup launches the engine and waits until it is
ready, its shutdown drains. The listener belongs to the ASGI server, so settings of the listener
(address, TLS, log format) are refused by name. Always holds: routes, checks and answers are those
of `quire serve`; without a key only requests to a loopback address are accepted, unless `insecure`
is given; after `stop` no engine process of the app runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.admin.reload import Reloader, sources_of
from quire.api.app import build_app
from quire.api.draining import close_state, drain, end_streams_of_dead_engine
from quire.api.engine_protocol import StartingEngine
from quire.api.request_spans import check_spans, open_spans
from quire.api.served_engine import served_engine
from quire.api.server_state import ServerState
from quire.base.errors import QuireError, SettingError
from quire.base.log import Log
from quire.base.native_module import require_native
from quire.config.admin_keys import read_admin_keys, read_api_keys
from quire.config.flags import flag_of, keywords_in_errors, server_and_engine_config
from quire.config.groups import EngineConfig
from quire.config.server_and_engine import check_together
from quire.config.server_config import ServerConfig
from quire.config.tenants import Tenant, read_tenants_of_server
from quire.engine.data_parallel.engine_configs import (
    end_engines,
    engine_configs,
    launch_engines,
)
from quire.hub.cache import with_local_model
from quire.obs.metrics import Metrics

# Settings of `quire serve` that belong to the ASGI server or to the program around it.
_LISTENER = ("host", "port", "uds", "tls_cert", "tls_key", "admin_port", "keep_alive_s")
_PROGRAM = ("api_processes", "grpc_port", "log_level", "log_format")
_ANY_HOST = "0.0.0.0"


def build_asgi(model: str | os.PathLike[str] = "", **settings: Any) -> ServedApp:
    """Return the application of `quire serve` with one model, for an ASGI server with lifespan.

    model: its directory, or its name in the cache; empty for the built-in model. settings: flags of
    `quire serve` with underscores (max_num_seqs=8). Raises SettingError or ConfigError.
    """
    _refuse_settings_of_others(settings)
    with keywords_in_errors():
        server, engine = server_and_engine_config({"model": model, **settings})
        if server.insecure:
            server = replace(server, host=_ANY_HOST)  # requests may name any host
        return ServedApp(server, engine, Log("server"))


class ServedApp:
    """The application and the engine behind it. Raises SettingError or ConfigError.

    `start` and `stop` are what the lifespan does, for programs that have none. state, engine: of
    the started app.
    """

    state: ServerState

    def __init__(self, server: ServerConfig, engine: EngineConfig, log: Log) -> None:
        require_native()
        check_together(server, engine)
        keys = (*server.api_key, *read_api_keys(server.api_key_file))
        self.server = replace(server, api_key=keys)
        self._config = with_local_model(engine)
        engine_configs(self._config)  # fail early where they cannot be
        self._tenants_file = engine.scheduler.tenants
        self._tenants = None if self._tenants_file is None else self._read_tenants()
        self._log = log
        self._app: ASGIApp | None = None
        read_admin_keys(server.admin_key_file)  # fail early if it is invalid
        if server.otlp_endpoint is not None:
            check_spans(server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif self._app is None:
            raise RuntimeError(
                "the application is not started: run it by an ASGI server with lifespan, as "
                "uvicorn with --lifespan on, or await its start() first"
            )
        else:
            await self._app(scope, receive, send)

    async def start(self) -> None:
        """Start the engine and wait until requests are accepted.

        Raises what keeps it from it. All that was opened is closed then: `start` may be called
        again once the cause is corrected.
        """
        if self._app is not None:
            raise RuntimeError("the application is started already; await stop() first")
        async with AsyncExitStack() as opened:
            app = self._open(opened)
            await self.engine.ready()
            self._watch(opened)
            self.state.start(self.engine)
            self._opened = opened.pop_all()
        self._app = app
        self._log.event("ready", model=self.engine.card.name)

    def _open(self, opened: AsyncExitStack) -> ASGIApp:
        """Return the application; launch the engine. What is open is added to `opened`."""
        names = [tenant.name for tenant in self._tenants or ()]
        self.state = ServerState(self.server, Metrics(names), self._log, self._tenants)
        opened.push_async_callback(close_state, self.state)
        app = build_app(self.state)
        engines = launch_engines(self._config, self.server.logging)
        try:
            self.engine: StartingEngine = served_engine(engines, self.server, self._log)
        except BaseException:
            end_engines(engines)
            raise
        opened.push_async_callback(self.engine.close)
        return app

    def _watch(self, opened: AsyncExitStack) -> None:
        """Trace requests, and watch files and the engine. What is open is added to `opened`."""
        spans = open_spans(self.state, self.server, self._log, os.environ)
        if spans is not None:
            opened.push_async_callback(spans.close)
            self.state.on_begin, self.state.requests.on_end = spans.begin, spans.ended
        reloader = self._new_reloader()
        opened.callback(reloader.close)
        reloader.watch()
        self._died = asyncio.ensure_future(self.engine.dead.wait())
        watching = asyncio.ensure_future(self._end_after_death())
        opened.push_async_callback(_end_tasks, self._died, watching)

    async def stop(self) -> None:
        """Refuse new requests, let open ones finish within the grace time, and end the engine."""
        if self._app is not None:
            await self.drain()
            await self.close()

    async def drain(self) -> None:
        """Refuse new requests, and let open ones finish within the grace time; then end them."""
        await drain(self.state, self._died)

    async def close(self) -> None:
        """End the engine, and close the stores."""
        self._app = None
        await self._opened.aclose()
        self._log.event("stopped")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        try:
            await self.start()
        except QuireError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _end_after_death(self) -> None:
        """End open streams when the engine dies; /health then reports "dead" until `stop`."""
        await self.engine.dead.wait()
        reason = self.engine.health().reason
        self._log.error("the engine is dead; requests are refused", reason=reason)
        await end_streams_of_dead_engine(self.state)

    def _new_reloader(self) -> Reloader:
        reads = None if self._tenants_file is None else self._read_tenants
        sources = sources_of(
            self.state, read_tenants=reads, tenants_file=self._tenants_file, contexts=()
        )
        return Reloader(self._log, sources)

    def _read_tenants(self) -> Sequence[Tenant]:
        assert self._tenants_file is not None, "only called if there is a file"
        return read_tenants_of_server(self._tenants_file, has_keys=bool(self.server.api_key))


async def _end_tasks(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _refuse_settings_of_others(settings: dict[str, Any]) -> None:
    """Raise SettingError for what the ASGI server or the program around the app decides."""
    for field in fields(ServerConfig):
        names = {field.name, flag_of(field)[2:].replace("-", "_")}
        for name in sorted(names & settings.keys()):
            if field.name in _LISTENER:
                raise SettingError(
                    f"{name} is a setting of the listener; leave it out, and set it at the ASGI "
                    "server, or run `quire serve`"
                )
            if field.name in _PROGRAM:
                raise SettingError(
                    f"{name} is not available inside another program's ASGI server; leave it out, "
                    "or run `quire serve`"
                )
