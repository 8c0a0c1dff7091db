"""The application of an API process's private socket, for the other processes of its server.

Serves requests by id that another process received, and the shared state. That process has checked
and logged the request, and sends the digest of its key along, and whether it is an admin's. Knows
no client. Always holds: a request to the private socket is not forwarded again.
"""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.admin.record import RecordRoutes
from quire.api.http.dialect import Dialect, error_response
from quire.api.http.request_io import ClientDisconnected
from quire.api.native.requests import RequestRoutes
from quire.api.native.timelines import TimelineRoutes
from quire.api.openai.responses.open_store import store_of
from quire.api.openai.responses.stored_routes import StoredRoutes
from quire.api.server_state import ServerState
from quire.api.workers.sibling_workers import (
    ADMIN_HEADER,
    KEY_HEADER,
    RECORD_PATH,
    STATE_PATH,
    SiblingWorkers,
    WorkerState,
)
from quire.base.errors import QuireError


def build_private_app(
    server_state: ServerState, siblings: SiblingWorkers, dialect: Dialect
) -> ASGIApp:
    """Return the application of the private socket. dialect: of errors."""
    requests, shared = RequestRoutes(server_state), _SharedState(server_state, siblings)
    store = store_of(server_state.config, siblings.responses_store)
    server_state.closing.callback(store.close)
    routes = [
        *requests.routes(),
        *StoredRoutes(server_state, store).private_routes(),
        *TimelineRoutes(server_state).routes(),
        Route(STATE_PATH, shared.get, methods=["GET"]),
        Route(STATE_PATH, shared.put, methods=["PUT"]),
        Route(RECORD_PATH, RecordRoutes(server_state).get_own, methods=["GET"]),
    ]
    return _PrivateMiddleware(Router(routes, redirect_slashes=False), dialect)


class _SharedState:
    def __init__(self, server_state: ServerState, siblings: SiblingWorkers) -> None:
        self._server_state = server_state
        self._siblings = siblings

    async def get(self, request: Request) -> Response:
        return Response(msgspec.json.encode(self._siblings.state(self._server_state)))

    async def put(self, request: Request) -> Response:
        state = msgspec.json.decode(await request.body(), type=WorkerState)
        self._siblings.adopt(self._server_state, state)
        return await self.get(request)


class _PrivateMiddleware:
    """Takes the digest of the key from the request, and writes errors as responses."""

    def __init__(self, app: ASGIApp, dialect: Dialect) -> None:
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        digest = headers.get(KEY_HEADER.encode(), b"")
        scope["state"] = {
            "key": bytes.fromhex(digest.decode("latin-1")),
            "is_admin": ADMIN_HEADER.encode() in headers,
        }
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            pass
        except QuireError as error:
            request_id = f"req-{secrets.token_hex(12)}"
            response = error_response(error, self._dialect, request_id=request_id)
            await response(scope, receive, send)
