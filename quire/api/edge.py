"""The outermost layer of each request: keys, errors as JSON, one log line, counters.

Log lines carry the route, never a raw path, a prompt or a key. /health and /metrics, which are
polled, are logged only when they fail. Always holds: each HTTP request is counted once, with a
status; 499 stands for a caller who left before there was one.
"""

from __future__ import annotations

import re
import secrets
import time
import traceback
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.answers import Answers
from quire.api.callers import Callers
from quire.api.errors import MethodNotAllowed, UnknownRoute, error_response
from quire.api.gone import ClientGone
from quire.api.serving import Serving
from quire.base.errors import QuireError
from quire.config.tenants import Tenant

_POLLED = frozenset({"/health", "/metrics"})
# What a log line calls parts of a request's state.
_SHOWN = {"name": "name", "trace": "trace"}
_PLAIN_NAME = re.compile(rb"[A-Za-z0-9._:+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_GONE = 499
_FAULT = 500


class Edge:
    """Wraps the routes."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._callers = Callers(serving.config, has_keys=bool(serving.keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        name = own_name(scope["headers"])
        exchange = _Exchange(send, name)
        scope["state"] = {"key": b"", "name": name, "trace": trace_of(scope["headers"])}
        started_s = time.monotonic()
        self._serving.metrics.opened()
        try:
            with self._serving.request(counts=scope["method"] == "POST"):
                await self._answer(scope, receive, exchange)
        finally:
            self._note(scope, exchange, took_ms=(time.monotonic() - started_s) * 1e3)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        try:
            self._callers.check(scope["headers"])
            caller = self._serving.keys.check(scope["path"], _authorization(scope))
            scope["state"] |= {"tenant": caller.tenant, "key": caller.key}
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            exchange.status = exchange.status or _GONE
            self._serving.metrics.disconnect()
        except HTTPException as error:
            refusal: QuireError = (
                MethodNotAllowed(
                    f"{scope['method']} is not allowed at this path",
                    allowed=(error.headers or {}).get("Allow", ""),
                )
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

    def _note(self, scope: Scope, exchange: _Exchange, *, took_ms: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        status = exchange.status or _FAULT  # none began, and the caller did not leave
        self._serving.metrics.answered(route=route, status=status)
        if route in _POLLED and status < 400:
            return
        fields: dict[str, str | int | float] = {
            "request": exchange.request_id,
            "method": scope["method"],
            "route": route,
            "status": status,
            "took_ms": round(took_ms, 1),
        }
        state = scope["state"]
        fields |= {name: state[key] for name, key in _SHOWN.items() if state.get(key)}
        tenant = state.get("tenant")
        if isinstance(tenant, Tenant) and not tenant.is_default:
            fields["tenant"] = tenant.name
        answers = scope["state"].get("answers")
        if isinstance(answers, Answers):
            usage = answers.usage
            fields |= {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
                "finish": answers.finish_reasons,
            }
        self._serving.log.event("request", **fields)


class _Exchange:
    """Passes messages on and remembers the status; 0 until the response has begun.

    name: what the caller calls the request; `x-request-id` then says that, else our id.
    """

    def __init__(self, send: Send, name: str) -> None:
        self.status = 0
        self.request_id = ""
        self._send = send
        self._name = name.encode("ascii")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [value for name, value in message["headers"] if name == b"x-request-id"]
            self.request_id = ids[0].decode("ascii") if ids else ""
            if self._name:
                kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": [*kept, (b"x-request-id", self._name)]}
        await self._send(message)


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


def _authorization(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    return None
