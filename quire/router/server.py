"""The router's process: start, serve, drain, exit code.

A first signal drains: new requests are refused, open ones may end within the grace time, and are
then ended with an error. A second ends at once. Where other routers share the port, a draining one
leaves it to them. HTTP is uvicorn's. Always holds: what was answered within the grace time may be
read until its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn

from quire.base.heap import freeze_heap
from quire.base.log import Log
from quire.base.waiting_connections import WaitingConnections
from quire.router.head_bounds import BoundedHeads
from quire.router.service import LAST_EVENTS_S, RouterService

_SENT_CHECK_S = 0.05


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, at listening sockets only."""

    _waiting: tuple[WaitingConnections, ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await self.lifespan.startup()
        connect = partial(
            BoundedHeads,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        running = self.server_state.tasks
        self._waiting = tuple(WaitingConnections(at, connect, running) for at in sockets or ())
        self.servers = [await one.serve(self.config.backlog) for one in self._waiting]
        self.started = True

    def stop_listening(self) -> None:
        """Accept the connections that wait, and no further ones."""
        for one in self._waiting:
            one.accept()
        for server in self.servers:
            server.close()

    async def wait_until_sent(self, until_s: float) -> None:
        """Wait until clients have read what was written, or until a time of the loop."""
        loop = asyncio.get_running_loop()
        while loop.time() < until_s and any(
            cast(BoundedHeads, one).transport.get_write_buffer_size()
            for one in self.server_state.connections
        ):
            await asyncio.sleep(_SENT_CHECK_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    open_service: Callable[[], Awaitable[RouterService]],
    listening: socket.socket,
    log: Log,
    announce: Callable[[int], None],
) -> int:
    """Serve until a signal; return the exit code. open_service: opens the router in the event loop.
    announce: called with the number of available replicas once requests are accepted."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(open_service, listening, log, announce))


async def _serve(
    open_service: Callable[[], Awaitable[RouterService]],
    listening: socket.socket,
    log: Log,
    announce: Callable[[int], None],
) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    service = await open_service()
    server = _new_server(service)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        if not service.fleet.num_available:
            log.warning("no replica is available yet", reason=service.fleet.why_none())
        freeze_heap()
        announce(service.fleet.num_available)
        ends = {stopped, serving, service.probing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if service.probing.done():
            log.error("a task of the router ended", reason=service.why_ended())
            return 1
        if serving.done():
            log.error("the HTTP server ended by itself")
            return 1
        if listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            server.stop_listening()
        await server.wait_until_sent(until_s=await service.drain())
        return 0
    finally:
        server.should_exit = True
        await asyncio.wait({serving}, timeout=LAST_EVENTS_S)
        for task in (serving, stopped):
            task.cancel()
        await asyncio.gather(serving, stopped, return_exceptions=True)
        await service.close()


def _new_server(service: RouterService) -> _Server:
    return _Server(
        uvicorn.Config(
            service.app,
            http=BoundedHeads,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # what clients send is no warning
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
