"""EngineReplica: one engine with the HTTP server of `quire serve`, inside an actor of Ray Serve.

It listens at a port of its own and holds a lease in the directory; routers send it requests there,
so no token passes through Ray. Serve starts, checks, scales and stops it. Always holds: the lease
begins after the engine is ready and is given up before it drains; a stopped replica drains within
the grace time, and what it ends then continues on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import msgspec

from quire.api.asgi import ServedApp
from quire.api.http.sockets import listen, url_of
from quire.api.server import new_http_server
from quire.base.log import Log
from quire.deploy.ray_serve.app_args import AppArgs
from quire.deploy.ray_serve.directory import Directory, hold_lease
from quire.deploy.ray_serve.load_report import LoadReport

_LAST_EVENTS_S = 3.0
# So long a replica that drains answers at least, so that routers read it in /health.
_NOTICE_S = 1.0


class EngineReplica:
    """host: the address to listen at. num_threads: of the engine, where settings have none."""

    def __init__(self, args: AppArgs, directory: Directory, host: str, num_threads: int) -> None:
        settings = args.settings
        if not {"threads", "num_threads"} & {name.replace("-", "_") for name in settings}:
            args = msgspec.structs.replace(args, settings={**settings, "num_threads": num_threads})
        server, engine = args.configs(host)
        self._log = Log("replica")
        self._directory = directory
        self._app = ServedApp(server, engine, self._log)
        self._listening: socket.socket = listen(
            self._app.server, has_tenants=engine.scheduler.tenants is not None
        )
        self.address = url_of(self._listening)
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Start the engine, serve, and take a lease."""
        try:
            await self._app.start()
        except BaseException:
            self._listening.close()
            raise
        self._load = LoadReport(self._app.engine)
        self._server = new_http_server(self._app, self._app.state)
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._listening])),
            asyncio.create_task(hold_lease(self._directory, self.address, self._log)),
        ]
        self._log.event("replica serves", address=self.address)

    async def stop(self) -> None:
        """Give the lease up, drain, and end the engine."""
        if not self._tasks:
            return
        serving, leasing = self._tasks
        self._tasks = []
        leasing.cancel()
        await asyncio.gather(leasing, return_exceptions=True)
        with contextlib.suppress(Exception):  # it expires by itself
            await asyncio.wait_for(self._directory.give_up(self.address), 2.0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self._app.drain()
        await asyncio.sleep(began_s + _NOTICE_S - loop.time())
        self._server.should_exit = True
        await asyncio.wait({serving}, timeout=_LAST_EVENTS_S)
        serving.cancel()
        await self._app.close()

    def check(self) -> None:
        """Raise RuntimeError where the replica must be replaced: dead, or without progress."""
        if not self._tasks:
            return
        if self._tasks[0].done():
            raise RuntimeError("the HTTP server has ended")
        health = self._app.state.health()
        if health.state == "dead" or (health.state == "ready" and not health.ok):
            raise RuntimeError(f"the engine is {health.state}: {health.reason}")

    async def load(self) -> dict[str, float]:
        """Return what scaling.py reads."""
        return await self._load.read() if self._tasks else {}
