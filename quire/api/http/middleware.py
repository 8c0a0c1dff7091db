"""The outermost layer of each request: path, keys, errors, counters, one line of the access log.

Does what every route would have to do. The log line has route, status, times and counts, never a
raw path, a prompt, a text or a key; polled routes are logged at level debug unless they fail.
Always holds: each HTTP request is counted once, with a status (499: the client disconnected before
there was one), one log line and one id, which is in a header of its response; the path that is
checked is the path that is served.
"""

from __future__ import annotations

import re
import secrets
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import Message, Receive, Scope, Send

from quire.api.generation.choice_streams import ChoiceStreams
from quire.api.generation.foreign_fields import as_sent
from quire.api.http.auth import Admin
from quire.api.http.dialect import Dialect, error_response
from quire.api.http.errors import MethodNotAllowed, UnknownRoute
from quire.api.http.forwarding import is_here
from quire.api.http.origins import OriginCheck, is_guarded
from quire.api.http.paths import foreign_hint
from quire.api.http.request_io import ClientDisconnected
from quire.api.server_state import OpenRequest, ServerState
from quire.base.cors import Cors, Headers
from quire.base.errors import InvalidParameter, QuireError
from quire.base.http_apis import served_path
from quire.base.report import Field
from quire.base.show import show
from quire.config.tenants import ONLY_TENANT, Tenant

_PLAIN_NAME = re.compile(rb"[A-Za-z0-9._:+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
PREFLIGHT = "preflight"
# The status of a request if its client disconnected before there was a response.
CLIENT_CLOSED = 499
_FAULT = 500
_POLLED = frozenset({"/health", "/v1/health", "/metrics", "/v1/engine", "/web/{file}", PREFLIGHT})


class RequestMiddleware:
    """Wraps the routes of one listener.

    dialect: of errors at paths that `dialects`, by path or prefix of paths, does not list.
    for_admins: the listener is reachable from this machine only.
    """

    def __init__(
        self,
        router: Router,
        server_state: ServerState,
        dialect: Dialect,
        *,
        dialects: Mapping[str, Dialect] | None = None,
        for_admins: bool = False,
    ) -> None:
        self._router = router
        self._server_state = server_state
        self._dialect = dialect
        self._dialects = dialects or {}
        self._for_admins = for_admins
        config = server_state.config
        self._origin_check = OriginCheck(
            config, has_keys=bool(server_state.keys), for_admins=for_admins
        )
        has_cors = bool(config.cors_origin) and not for_admins
        self._cors = Cors(config.cors_origin) if has_cors else None
        self._prefix = config.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        strip_prefix(scope, self._prefix)
        path = scope["path"]
        if not path.startswith("/v1/") or path.endswith("/"):  # others are spelled as served
            path = scope["path"] = served_path(path)
        name = client_request_id(scope["headers"])
        origin = None
        if self._cors is not None and not is_guarded(path):
            origin = self._cors.origin_of(scope["headers"])
        cors_headers = [] if self._cors is None else self._cors.headers(origin)
        exchange = _Exchange(send, name, cors_headers, self._dialect_of(path))
        scope["app"] = self  # makes the router raise what it refuses
        scope["state"] = {"key": b"", "name": name, "trace": trace_of(scope["headers"])}
        started_s = time.monotonic()
        self._server_state.metrics.opened()
        try:
            with self._server_state.track_request(counts=scope["method"] == "POST"):
                await self._answer(scope, receive, exchange, origin)
        finally:
            self._record(scope, exchange, started_s)

    async def _answer(
        self, scope: Scope, receive: Receive, exchange: _Exchange, origin: str | None
    ) -> None:
        try:
            path, keys, headers = scope["path"], self._server_state.keys, scope["headers"]
            guarded = is_guarded(path)
            self._origin_check.check(
                headers,
                is_cors_allowed=origin is not None,
                is_guarded=guarded and not keys.needed(path),
            )
            preflight = None
            if self._cors is not None:
                preflight = self._cors.preflight(scope["method"], headers, origin)
            if preflight is not None:  # before the keys: browsers send none with it
                exchange.route = PREFLIGHT
                response = Response(status_code=204)
                response.raw_headers += preflight
                await response(scope, receive, exchange.send)
                return
            caller = keys.open_caller
            if caller is None or guarded:
                caller = keys.check(
                    path,
                    lambda: exchange.dialect.read_key(headers),
                    is_here=lambda: self._for_admins or is_here(scope),
                    query=scope["query_string"],
                )
            is_admin = caller.admin is Admin.ANYWHERE
            scope["state"] |= {"tenant": caller.tenant, "key": caller.key, "is_admin": is_admin}
            await self._router(scope, receive, exchange.send)
        except ClientDisconnected:
            exchange.status = exchange.status or CLIENT_CLOSED
            self._server_state.metrics.disconnect()
        except HTTPException as error:
            await self._refuse(self._routing_error(error, scope), scope, receive, exchange)
        except QuireError as error:
            sent = scope["state"].get("body")
            if sent is not None and isinstance(error, InvalidParameter):
                error = as_sent(error, sent)
            await self._refuse(error, scope, receive, exchange)
        except Exception as error:  # a bug: report it, and keep serving other requests
            self._server_state.log.error("request failed", traceback=traceback.format_exc())
            fault = QuireError(f"internal error ({type(error).__name__}); the server's log has it")
            if exchange.status:
                self._server_state.count_error(fault)
                raise
            await self._refuse(fault, scope, receive, exchange)

    async def _refuse(
        self, error: QuireError, scope: Scope, receive: Receive, exchange: _Exchange
    ) -> None:
        self._server_state.count_error(error)
        response = error_response(error, exchange.dialect, request_id=_new_request_id())
        await response(scope, receive, exchange.send)

    def _dialect_of(self, path: str) -> Dialect:
        for prefix, dialect in self._dialects.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        return self._dialect

    def _routing_error(self, error: HTTPException, scope: Scope) -> QuireError:
        if error.status_code != 405:
            return UnknownRoute("nothing is served at this path; GET / lists what is")
        methods = [
            route.methods or set()
            for route in self._router.routes
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        ]
        allowed = ", ".join(sorted(set().union(*methods)))
        hint = foreign_hint(scope["method"], scope["path"]) or f"use {allowed}"
        return MethodNotAllowed(
            f"{scope['method']} is not allowed at {show(scope['path'])}; {hint}", allowed=allowed
        )

    def _record(self, scope: Scope, exchange: _Exchange, started_s: float) -> None:
        """Count a response, and log the request once it has ended."""
        route = exchange.route or getattr(scope.get("route"), "path", "unknown")
        status = exchange.status or _FAULT  # no response began, and the client is still there
        self._server_state.metrics.answered(route=route, status=status)
        log_format = self._server_state.config.access_log

        def log() -> None:
            level = "debug" if route in _POLLED and status < 400 else "info"
            fields: dict[str, Field] = {
                "request": exchange.request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "took_ms": round((time.monotonic() - started_s) * 1e3, 1),
                **_request_fields(scope["state"], status),
            }
            if log_format == "json":
                self._server_state.log.event_as_json("request", fields, level=level)
            elif level == "debug":
                self._server_state.log.debug("request", **fields)
            else:
                self._server_state.log.event("request", **fields)

        if log_format == "off":
            return
        request = scope["state"].get("open_request")
        if isinstance(request, OpenRequest) and request.ended_s is None:
            request.on_end = log  # a resumable stream continues without its client
        else:
            log()


class _Exchange:
    """Passes messages on and records the status; 0 until the response has begun.

    name: the client's `x-request-id`, which replaces this server's. cors_headers: added to every
    response. route: set where no route of the router answers.
    """

    def __init__(self, send: Send, name: str, cors_headers: Headers, dialect: Dialect) -> None:
        self.status = 0
        self.request_id = ""
        self.route = ""
        self.dialect = dialect
        self._send = send
        self._name = name.encode("ascii")
        self._cors_headers = cors_headers

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            id_ = dict(message["headers"]).get(b"x-request-id") or _new_request_id().encode()
            self.request_id = id_.decode("ascii")
            ids = {self.dialect.id_header.encode(): id_, b"x-request-id": self._name or id_}
            headers = [pair for pair in message["headers"] if pair[0] not in ids]
            message = {**message, "headers": [*headers, *ids.items(), *self._cors_headers]}
        await self._send(message)


def _request_fields(state: Mapping[str, Any], status: int) -> dict[str, Field]:
    """Return the fields of a log line that come from the request's handlers."""
    fields: dict[str, Field] = {name: state[name] for name in ("name", "trace") if state.get(name)}
    tenant, answers = state.get("tenant"), state.get("answers")
    if isinstance(tenant, Tenant) and tenant is not ONLY_TENANT and not tenant.is_default:
        fields["tenant"] = tenant.name
    if isinstance(answers, ChoiceStreams):
        usage, timings = answers.usage, answers.timings
        first_ms = None if timings is None else timings.first_token_ms
        fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "finish": answers.finish_reasons,
            **({} if first_ms is None else {"ttft_ms": round(first_ms, 1)}),
        }
    request = state.get("open_request")
    if isinstance(request, OpenRequest) and request.error is not None and status != CLIENT_CLOSED:
        fields["error"] = request.error
    return fields


def _new_request_id() -> str:
    """Return the id of a request that no route gave one."""
    return f"req-{secrets.token_hex(12)}"


def strip_prefix(scope: Scope, prefix: str) -> None:
    """Remove --root-path from the path, if the proxy has left it there."""
    path = scope["path"]
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        scope["path"] = path[len(prefix) :] or "/"


def client_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `x-request-id` that the client gave, if it is short and plain; else ""."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode("ascii") if _PLAIN_NAME.fullmatch(value) else ""
    return ""


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the trace id of `traceparent` (W3C Trace Context) if it is well formed, else ""."""
    found = [value for name, value in headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(found[0]) if len(found) == 1 else None
    if match is None or match[1] == b"ff" or not match[2].strip(b"0") or not match[3].strip(b"0"):
        return ""
    return match[2].decode("ascii")
