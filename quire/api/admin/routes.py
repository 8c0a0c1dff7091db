"""/admin: pause, resume and drain a server that goes on, for admins (auth.py guards the paths).

Paused, requests for tokens wait at the edge, and what runs goes on; drained, nothing new is taken
(503). Resume ends both. The log's level is the API processes': the engine's logs its start and what
goes wrong. What is set holds in all API processes when it is answered. Knows no engine. Always
holds: a server that is being stopped by a signal is not resumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.http.request_body import read_object
from quire.api.server_state import ServerState
from quire.api.workers.sibling_workers import WorkerState
from quire.base.errors import InvalidParameter
from quire.base.log import LEVELS
from quire.base.show import show


class AdminRoutes:
    """The routes."""

    def __init__(self, serving: ServerState) -> None:
        self._serving = serving

    async def get(self, request: Request) -> Response:
        """What is taken now, and how many requests are open and held."""
        peers = self._serving.peers
        return self._told([] if peers is None else await peers.look())

    async def pause(self, request: Request) -> Response:
        """Requests for tokens wait from now on."""
        await _no_body(request)
        self._serving.pause()
        return await self._changed()

    async def drain(self, request: Request) -> Response:
        """Nothing new is taken; what is open goes on."""
        await _no_body(request)
        self._serving.refuse_new()
        return await self._changed()

    async def resume(self, request: Request) -> Response:
        """As before a pause or a drain."""
        await _no_body(request)
        self._serving.resume()
        return await self._changed()

    async def log_level(self, request: Request) -> Response:
        """From now on what is worth less is not logged."""
        limit_bytes = self._serving.config.max_body_bytes
        body, _ = await read_object(request, limit_bytes=limit_bytes)
        if request.query_params or body.keys() != {"level"}:
            raise InvalidParameter('the body must have "level" and nothing else, and no parameters')
        if body["level"] not in LEVELS:
            raise InvalidParameter(
                f"level is {show(body['level'])}; {', '.join(LEVELS)} are allowed", param="level"
            )
        self._serving.log.level = body["level"]
        return await self._changed()

    async def _changed(self) -> Response:
        peers = self._serving.peers
        return self._told([] if peers is None else await peers.tell(self._serving))

    def _told(self, others: Sequence[WorkerState]) -> Response:
        serving = self._serving
        told = {
            "object": "server",
            "paused": serving.paused,
            "draining": serving.draining,
            "open_requests": serving.live.num_open + sum(one.open_requests for one in others),
            "held_requests": serving.num_held + sum(one.held_requests for one in others),
            "log_level": serving.log.level,
        }
        return Response(
            msgspec.json.encode(told),
            headers={"cache-control": "no-store"},
            media_type="application/json",
        )


async def _no_body(request: Request) -> None:
    if request.query_params or (await request.body()).strip() not in (b"", b"{}"):
        raise InvalidParameter("this was sent with parameters; it takes none: leave them out")
