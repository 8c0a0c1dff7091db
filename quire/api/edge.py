"""The outermost layer of each request: keys, errors as JSON, one log line, counters.

Log lines carry the route, never a raw path, a prompt or a key. /health and /metrics, which are
polled, are logged only when they fail. Always holds: each HTTP request is counted once, with a
status; 499 stands for a caller who left before there was one.
"""

from __future__ import annotations

import secrets
import time
import traceback

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.api.answers import Answers
from quire.api.auth import Keys
from quire.api.callers import Callers
from quire.api.errors import MethodNotAllowed, UnknownRoute, error_response
from quire.api.gone import ClientGone
from quire.api.serving import Serving
from quire.base.errors import QuireError
from quire.config.tenants import Tenant

_POLLED = frozenset({"/health", "/metrics"})
_GONE = 499
_FAULT = 500


class Edge:
    """Wraps the routes."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._keys = Keys(serving.config.api_key, serving.tenants)
        self._callers = Callers(serving.config, has_keys=bool(self._keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = _Exchange(send)
        scope["state"] = {}
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
            caller = self._keys.check(scope["path"], _authorization(scope))
            scope["state"]["tenant"] = caller.tenant
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
        tenant = scope["state"].get("tenant")
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
    """Passes messages on and remembers the status; 0 until the response has begun."""

    def __init__(self, send: Send) -> None:
        self.status = 0
        self.request_id = ""
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [value for name, value in message["headers"] if name == b"x-request-id"]
            self.request_id = ids[0].decode("ascii") if ids else ""
        await self._send(message)


def _authorization(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value)
    return None
