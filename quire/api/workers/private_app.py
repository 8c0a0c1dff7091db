"""What an API process serves at its private socket, where only its server's other processes ask.

Requests by id that came to another process, and the state they share. Keys were checked, counted
and logged where the request came in; it brings the digest of its key along. Knows no caller. Always
holds: what is asked here is answered here and passed on no further.
"""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.http.cancellation import ClientDisconnected
from quire.api.http.errors import error_response
from quire.api.native.requests import RequestRoutes
from quire.api.server_state import ServerState
from quire.api.workers.sibling_workers import KEY_HEADER, STATE_PATH, SiblingWorkers, WorkerState
from quire.base.errors import QuireError


def build_private_app(serving: ServerState, peers: SiblingWorkers) -> ASGIApp:
    """The application at the private socket."""
    requests, shared = RequestRoutes(serving), _Shared(serving, peers)
    routes = [
        *requests.routes(),
        Route(STATE_PATH, shared.get, methods=["GET"]),
        Route(STATE_PATH, shared.put, methods=["PUT"]),
    ]
    return _Inside(Router(routes, redirect_slashes=False))


class _Shared:
    def __init__(self, serving: ServerState, peers: SiblingWorkers) -> None:
        self._serving = serving
        self._peers = peers

    async def get(self, request: Request) -> Response:
        return Response(msgspec.json.encode(self._peers.state(self._serving)))

    async def put(self, request: Request) -> Response:
        told = msgspec.json.decode(await request.body(), type=WorkerState)
        self._peers.adopt(self._serving, told)
        return await self.get(request)


class _Inside:
    """Errors as their answers; the key's digest as the request brings it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        digest = dict(scope["headers"]).get(KEY_HEADER.encode(), b"")
        scope["state"] = {"key": bytes.fromhex(digest.decode("latin-1"))}
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            pass
        except QuireError as error:
            request_id = f"req-{secrets.token_hex(12)}"
            await error_response(error, request_id=request_id)(scope, receive, send)
