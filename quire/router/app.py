"""The router's ASGI application: its routes, and what surrounds each request.

Generation routes are dispatched, and so are requests that any replica answers alike (/tokenize,
/v1/embeddings). Dialects with streams and errors of another form (Ollama's, llama.cpp's) are not.
Models are listed as the replicas list them; health and metrics are the router's own. Routes with
state at one replica (stored responses, admin) are refused by name.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quire.base.log import Log
from quire.router.admission import Admission
from quire.router.client_response import ClientResponse, Message, Receive, Send
from quire.router.dispatcher import Dispatcher, HandOver
from quire.router.faults import ClientGone, Refusal
from quire.router.fleet import Fleet
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import CONTENT_TYPE, RouterMetrics

ROUTED = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"),
    *("/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    *("/apply_template", "/apply-template"),
    *("/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"),
)
_JSON = [(b"content-type", b"application/json")]
_USE_OPENAI = "; send it to a replica, or use /v1/chat/completions, /v1/completions or " + (
    "/v1/embeddings here"
)
_OLLAMA = f"its streams and errors have Ollama's form{_USE_OPENAI}"
_LLAMA_CPP = f"its streams and errors have llama.cpp's form{_USE_OPENAI}"
_NOT_ROUTED = {
    "/v1/responses": "stored responses are kept by one server; send the request to a replica, or "
    "use /v1/chat/completions here",
    "/v1/requests": "requests are listed by the replica that has them; ask each replica",
    "/v1/engine": "each replica has its own engine; ask each replica",
    "/v1/cache": "each replica has its own cache; ask each replica",
    "/admin": "admin routes act on one server; send them to each replica",
    "/api": _OLLAMA,
    "/completion": _LLAMA_CPP,
    "/infill": _LLAMA_CPP,
    "/props": "each replica has its own settings; ask each replica",
    "/slots": "each replica has its own slots; ask each replica",
}


class RouterApp:
    """The application."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        log: Log,
        hand_over: HandOver | None = None,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._dispatcher = Dispatcher(fleet, admission, metrics, hand_over)
        self._log = log
        self._max_body_bytes = fleet.settings.max_body_bytes
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, client = scope["path"], ClientResponse(receive, send, scope["path"])
        try:
            await self._answer(scope, path, receive, client)
        except ClientGone:
            return
        except Refusal as refusal:
            self._metrics.refused.labels(refusal.code).inc()
            await client.refuse(refusal)
        finally:
            client.unwatch()
            route = path if path in ROUTED else "other"
            self._metrics.requests.labels(route, str(client.status or "gone")).inc()

    async def _answer(
        self, scope: dict[str, Any], path: str, receive: Receive, client: ClientResponse
    ) -> None:
        method = scope["method"]
        if path in ROUTED:
            if method != "POST":
                raise Refusal(405, "method_not_allowed", f"{path} takes POST, not {method}")
            await self._dispatch(scope, path, receive, client)
        elif method != "GET":
            raise _unknown(method, path)
        elif path == "/health":
            await self._health(client)
        elif path == "/metrics":
            headers = [(b"content-type", CONTENT_TYPE.encode())]
            await client.whole(200, headers, self._metrics.text())
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            await self._models(path.removeprefix("/v1/models").strip("/"), client)
        else:
            raise _unknown(method, path)

    async def _dispatch(
        self, scope: dict[str, Any], path: str, receive: Receive, client: ClientResponse
    ) -> None:
        if scope["query_string"]:
            raise Refusal(
                400, "invalid_value", "the query has parameters; send them as fields of the body"
            )
        headers = _forwarded(scope)
        key = self._admission.admit(headers)
        answering: asyncio.Task[None] | None = None
        try:
            raw = await self._body(scope, receive)
            client.watch()
            request = RoutedRequest(path, headers, raw)
            answering = asyncio.ensure_future(self._dispatcher.answer(request, client))
            await asyncio.wait({answering, self.cut}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise Refusal(
                    503, "shutting_down", "the router has stopped before the answer was complete"
                )
            answering.result()
        finally:
            if answering is not None and not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
            self._admission.leave(key)

    async def _body(self, scope: dict[str, Any], receive: Receive) -> bytes:
        """Read the body, of a bounded size."""
        pieces, num_bytes = list[bytes](), 0
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self._max_body_bytes:
                raise Refusal(
                    413,
                    "body_too_large",
                    f"the body has more than {self._max_body_bytes} bytes; send less",
                )
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _health(self, client: ClientResponse) -> None:
        """200 while a replica is available and requests are accepted."""
        available = self._fleet.num_available
        state = "ready" if available else "no replica"
        if self._admission.is_draining:
            state = "draining"
        replicas = [
            {
                "url": one.name,
                "state": one.state,
                "available": one.state == "ready" and not one.is_fenced,
                "reason": one.reason,
                "open": len(one.loads),
                "backlog_tokens": one.backlog_tokens,
                "models": one.models,
            }
            for one in self._fleet.replicas.values()
        ]
        body = {
            "ok": state == "ready",
            "state": state,
            "open": self._admission.num_open,
            "replicas_available": available,
            "replicas": replicas,
        }
        await client.whole(
            200 if state == "ready" else 503,
            [*_JSON, (b"cache-control", b"no-store")],
            msgspec.json.encode(body),
        )

    async def _models(self, name: str, client: ClientResponse) -> None:
        """List the models of all replicas, each once; or one of them."""
        entries: dict[str, dict[str, Any]] = {}
        for replica in self._fleet.replicas.values():
            for entry in replica.model_entries:
                entries.setdefault(str(entry.get("id")), entry)
        if not name:
            body: Any = {"object": "list", "data": list(entries.values())}
        elif name in entries:
            body = entries[name]
        else:
            served = " or ".join(map(repr, entries)) or "none yet"
            raise Refusal(
                404,
                "model_not_found",
                f"model {name!r} is not served here; served are: {served}",
                param="model",
            )
        await client.whole(200, _JSON, msgspec.json.encode(body))


def _forwarded(scope: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return the request's headers, with its client's address added to x-forwarded-for."""
    headers: list[tuple[bytes, bytes]] = [(name, value) for name, value in scope["headers"]]
    client = scope.get("client")
    if client is not None:
        before = [value for name, value in headers if name == b"x-forwarded-for"]
        headers = [header for header in headers if header[0] != b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*before, client[0].encode()])))
    return headers


def _unknown(method: str, path: str) -> Refusal:
    for top, why in _NOT_ROUTED.items():
        if path == top or path.startswith(f"{top}/"):
            return Refusal(501, "not_routed", f"the router does not route {path}: {why}")
    shown = path[:100]
    return Refusal(
        404,
        "unknown_url",
        f"there is no {method} {shown!r} here; routed are {', '.join(ROUTED)}, and there are "
        "/v1/models, /health and /metrics",
    )
