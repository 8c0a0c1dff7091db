"""/admin: pause, drain, resume and wake a server, or let it sleep (auth.py guards the paths).

While the server is paused, generation requests wait in the HTTP server, and running ones continue;
while it is drained, new requests get 503. Resume ends both. The log level is that of the API
processes, not of the engine. A setting holds in all API processes when its request is answered.
Knows no engine. Always holds: a server that is stopping is not resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.parameterless import refuse_parameters, refuse_query
from quire.api.http.request_io import read_object
from quire.api.server_state import ServerState
from quire.api.workers.sibling_workers import SiblingWorkers, WorkerState
from quire.base.errors import InvalidParameter
from quire.base.log import LEVELS
from quire.base.show import show


@runtime_checkable
class Sleeper(Protocol):
    """Engines that can be ended and started again."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class AdminRoutes:
    """The routes. siblings: the other API processes."""

    def __init__(self, server_state: ServerState, siblings: SiblingWorkers | None = None) -> None:
        self._server_state = server_state
        self._siblings = siblings

    async def get(self, request: Request) -> Response:
        """Return whether requests are accepted, and how many are open and held."""
        siblings = self._siblings
        return self._state([] if siblings is None else await siblings.states())

    async def pause(self, request: Request) -> Response:
        """Hold new generation requests."""
        await refuse_parameters(request)
        self._server_state.lifecycle.pause()
        return await self._changed()

    async def drain(self, request: Request) -> Response:
        """Refuse new requests; open ones continue."""
        await refuse_parameters(request)
        self._server_state.lifecycle.refuse_new()
        return await self._changed()

    async def resume(self, request: Request) -> Response:
        """Accept requests again after a pause or a drain."""
        await refuse_parameters(request)
        self._server_state.lifecycle.resume()
        return await self._changed()

    async def sleep(self, request: Request) -> Response:
        """End the engine, which frees its memory, until it is woken."""
        await refuse_parameters(request)
        await self._sleeper().sleep()
        return await self._changed()

    async def wake(self, request: Request) -> Response:
        """Start an engine that sleeps, and wait until it is ready."""
        await refuse_parameters(request)
        await self._sleeper().wake()
        return await self._changed()

    def _sleeper(self) -> Sleeper:
        """Return the engine as one that can sleep. Raises InvalidParameter."""
        engine = self._server_state.engine()
        if not isinstance(engine, Sleeper):
            raise InvalidParameter(
                "this server cannot put its engine to sleep; start it with --restart-engine"
            )
        return engine

    async def log_level(self, request: Request) -> Response:
        """Set the lowest level that is logged."""
        limit_bytes = self._server_state.config.max_body_bytes
        body, _ = await read_object(request, limit_bytes=limit_bytes)
        refuse_query(request)
        for name in body:
            if name != "level":
                raise InvalidParameter(
                    f"{show(name)} is not a field of this request, which takes level; leave it out",
                    param=name[:64],
                )
        level = body.get("level")
        if level not in LEVELS:
            raise InvalidParameter(
                f"level is {'missing' if level is None else show(level)}; "
                f"{', '.join(LEVELS)} are allowed",
                param="level",
            )
        self._server_state.log.level = level
        return await self._changed()

    async def _changed(self) -> Response:
        siblings = self._siblings
        return self._state([] if siblings is None else await siblings.publish(self._server_state))

    def _state(self, others: Sequence[WorkerState]) -> Response:
        server_state = self._server_state
        state = {
            "object": "server",
            "paused": server_state.lifecycle.paused,
            "draining": server_state.lifecycle.draining,
            "open_requests": server_state.requests.num_open
            + sum(one.open_requests for one in others),
            "held_requests": server_state.lifecycle.num_held
            + sum(one.held_requests for one in others),
            "asleep": server_state.health().state == "asleep",
            "log_level": server_state.log.level,
        }
        return Response(
            msgspec.json.encode(state),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )
