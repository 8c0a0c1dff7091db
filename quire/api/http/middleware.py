"""The outermost layer of each request: keys, errors as JSON, one log line, counters.

What every route would have to do is done here and in what this hands out to: who may ask (auth.py,
callers.py, cors.py), what is told of it (access.py). Always holds: each HTTP request is counted
once, with a status; 499 stands for a caller who left before there was one; the path that is
checked is the path that is served.
"""

from __future__ import annotations

import re
import secrets
import time
import traceback
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.generation.request_registry import OpenRequest
from quire.api.http.access_log import GONE, PREFLIGHT, AccessLog
from quire.api.http.auth import is_guarded
from quire.api.http.cancellation import ClientDisconnected
from quire.api.http.cors import Cors, Headers
from quire.api.http.errors import MethodNotAllowed, UnknownRoute, error_response
from quire.api.http.origin_check import OriginCheck
from quire.api.http.paths import served_path
from quire.api.http.sockets import is_loopback
from quire.api.server_state import ServerState
from quire.base.errors import QuireError
from quire.base.show import show

# Headers that proxies, CDNs, tunnels and cloud load balancers add: the client is not the peer.
_FORWARDING_HEADERS = frozenset(
    {
        *(b"forwarded", b"forwarded-for", b"via", b"cdn-loop", b"client-ip", b"true-client-ip"),
        *(b"remote-addr", b"x-client-ip", b"x-cluster-client-ip", b"x-real-ip", b"x-remote-ip"),
        *(b"x-remote-addr", b"x-originating-ip", b"x-proxyuser-ip", b"x-http-forwarded-for"),
        *(b"x-real-port", b"x-scheme", b"x-url-scheme", b"front-end-https", b"x-request-start"),
        *(b"x-cloud-trace-context", b"x-varnish", b"x-nginx-proxy", b"x-haproxy-server-state"),
        *(b"proxy-client-ip", b"wl-proxy-client-ip", b"x-proxy-id", b"x-proxied-for"),
        *(
            b"incap-client-ip",
            b"x-sucuri-clientip",
            b"x-nf-client-connection-ip",
            b"do-connecting-ip",
        ),
    }
)
_FORWARDING_PREFIXES = (
    *(b"x-forwarded", b"x-original-", b"x-envoy-", b"cf-", b"fly-", b"fastly-", b"tailscale-"),
    *(
        b"x-amzn-",
        b"x-amz-cf-",
        b"x-appengine-",
        b"x-azure-",
        b"x-arr-",
        b"x-vercel-",
        b"x-akamai-",
    ),
    *(b"akamai-", b"cloudfront-", b"x-ngrok-", b"x-traefik-", b"x-proxy-"),
)
_PLAIN_NAME = re.compile(rb"[A-Za-z0-9._:+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_FAULT = 500


class RequestMiddleware:
    """Wraps the routes. for_admins: they are served where only this machine can ask."""

    def __init__(self, app: ASGIApp, serving: ServerState, *, for_admins: bool = False) -> None:
        self._app = app
        self._serving = serving
        self._for_admins = for_admins
        config = serving.config
        self._callers = OriginCheck(config, has_keys=bool(serving.keys), for_admins=for_admins)
        self._cors = Cors(() if for_admins else config.cors_origin)
        self._access = AccessLog(serving.log, config.access_log)
        self._prefix = config.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        strip_prefix(scope, self._prefix)
        scope["path"] = served_path(scope["path"])
        name = own_name(scope["headers"])
        origin = self._cors.origin_of(scope)
        exchange = _Exchange(send, name, self._cors.headers(origin))
        scope["state"] = {"key": b"", "name": name, "trace": trace_of(scope["headers"])}
        started_s = time.monotonic()
        self._serving.metrics.opened()
        try:
            with self._serving.request(counts=scope["method"] == "POST"):
                await self._answer(scope, receive, exchange, origin)
        finally:
            self._note(scope, exchange, started_s)

    async def _answer(
        self, scope: Scope, receive: Receive, exchange: _Exchange, origin: str | None
    ) -> None:
        try:
            path = scope["path"]
            self._callers.check(
                scope["headers"],
                may_ask=origin is not None,
                is_guarded=is_guarded(path) and not self._serving.keys.needed(path),
            )
            preflight = self._cors.preflight(scope, origin)
            if preflight is not None:  # before keys: browsers send none with it
                exchange.route = PREFLIGHT
                await preflight(scope, receive, exchange.send)
                return
            caller = self._serving.keys.check(
                path, _authorization(scope), is_here=self._for_admins or is_here(scope)
            )
            scope["state"] |= {"tenant": caller.tenant, "key": caller.key}
            await self._app(scope, receive, exchange.send)
        except ClientDisconnected:
            exchange.status = exchange.status or GONE
            self._serving.metrics.disconnect()
        except HTTPException as error:
            refusal: QuireError = (
                _method_not_allowed(scope, (error.headers or {}).get("Allow", ""))
                if error.status_code == 405
                else UnknownRoute("nothing is served at this path; GET / lists what is")
            )
            await self._refuse(refusal, scope, receive, exchange)
        except QuireError as error:
            await self._refuse(error, scope, receive, exchange)
        except Exception as error:  # a fault of ours: report it, and let the others go on
            self._serving.log.error("request failed", traceback=traceback.format_exc())
            fault = QuireError(f"internal error ({type(error).__name__}); the server's log has it")
            if exchange.status:
                self._serving.failed(fault)
                raise
            await self._refuse(fault, scope, receive, exchange)

    async def _refuse(
        self, error: QuireError, scope: Scope, receive: Receive, exchange: _Exchange
    ) -> None:
        self._serving.failed(error)
        response = error_response(error, request_id=f"req-{secrets.token_hex(12)}")
        await response(scope, receive, exchange.send)

    def _note(self, scope: Scope, exchange: _Exchange, started_s: float) -> None:
        route = exchange.route or getattr(scope.get("route"), "path", "unknown")
        status = exchange.status or _FAULT  # none began, and the caller did not leave
        self._serving.metrics.answered(route=route, status=status)

        def log() -> None:
            self._access.note(
                scope["state"],
                request_id=exchange.request_id,
                method=scope["method"],
                route=route,
                status=status,
                took_ms=(time.monotonic() - started_s) * 1e3,
            )

        live = scope["state"].get("live")
        if isinstance(live, OpenRequest) and live.ended_s is None:
            live.on_end = log  # a resumable stream goes on without its reader
        else:
            log()


class _Exchange:
    """Passes messages on and remembers the status; 0 until the response has begun.

    name: what the caller calls the request; `x-request-id` then says that, else our id. further:
    headers of every answer. route: where no route has answered, what to call what did.
    """

    def __init__(self, send: Send, name: str, further: Headers) -> None:
        self.status = 0
        self.request_id = ""
        self.route = ""
        self._send = send
        self._name = name.encode("ascii")
        self._further = further

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [value for name, value in message["headers"] if name == b"x-request-id"]
            self.request_id = ids[0].decode("ascii") if ids else ""
            headers = [*message["headers"], *self._further]
            if self._name:
                headers = [pair for pair in headers if pair[0] != b"x-request-id"]
                headers.append((b"x-request-id", self._name))
            message = {**message, "headers": headers}
        await self._send(message)


def strip_prefix(scope: Scope, prefix: str) -> None:
    """Take what a proxy left before the path away; without it the path is as it was asked."""
    path = scope["path"]
    if prefix and (path == prefix or path.startswith(prefix + "/")):
        scope["path"] = path[len(prefix) :] or "/"


def is_here(scope: Scope) -> bool:
    """Return whether the peer is on this machine and no header shows that it is a proxy.

    A local proxy that adds none of these headers is taken for a local client.
    """
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    return not any(_is_forwarding(name) for name, _ in scope["headers"])


def _is_forwarding(name: bytes) -> bool:
    name = name.replace(b"_", b"-")  # as some gateways write it
    return name in _FORWARDING_HEADERS or name.startswith(_FORWARDING_PREFIXES)


def own_name(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What a caller calls its request (`x-request-id`), where that is short and plain; else ""."""
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode("ascii") if _PLAIN_NAME.fullmatch(value) else ""
    return ""


def trace_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The trace id of `traceparent` (W3C Trace Context), where it is well formed; else ""."""
    found = [value for name, value in headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(found[0]) if len(found) == 1 else None
    if match is None or match[1] == b"ff" or not match[2].strip(b"0") or not match[3].strip(b"0"):
        return ""
    return match[2].decode("ascii")


def _method_not_allowed(scope: Scope, allowed: str) -> MethodNotAllowed:
    return MethodNotAllowed(
        f"{scope['method']} is not allowed at {show(scope['path'])}; use {allowed}", allowed=allowed
    )


def _authorization(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    return None
