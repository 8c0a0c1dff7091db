"""The router's ASGI application: its routes, and what surrounds each request.

Routes of routes.py are dispatched to replicas. Models are listed as the replicas list them, each
once, with the aliases; health and metrics are the router's own. Routes with state at one replica
(admin, files) are refused by name. Always holds: a query is passed on as it is, for the replica to
read or to refuse; with --cors-origin each response has the CORS headers of the router only.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import msgspec

from quire.base.cors import Cors
from quire.base.http_apis import header_in, served_path
from quire.base.log import Log
from quire.base.request_body import BODY_TIME_S, LENGTH_DIGITS, large_body, late_body
from quire.router.admission import Admission
from quire.router.api_forms import form_of
from quire.router.client_response import ClientResponse, Message, Receive, Send
from quire.router.dispatcher import Dispatcher, HandOver, LookUp
from quire.router.faults import ClientGone, Refusal
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.head_bounds import WRITER
from quire.router.model_lists import ModelLists
from quire.router.output_rate import OutputRate
from quire.router.quotas import Reservation
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import CONTENT_TYPE, RouterMetrics
from quire.router.routes import LISTS, ROUTES, FoundRoute, find_route, reason_not_routed
from quire.router.stream_relay import DRAINS
from quire.router.summaries import HEADER, read_order
from quire.router.tiers import LIMITED

_JSON = [(b"content-type", b"application/json")]
_CLOSE = (b"connection", b"close")
_DISCARD_S = 1.0
_PREFLIGHT = "preflight"
# Response headers of a router that a page may read.
_SHOWN = (HEADER.decode(), "x-should-retry")


class RouterApp:
    """The application."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        log: Log,
        features: Features | None = None,
        hand_over: HandOver | None = None,
        look_up: LookUp | None = None,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._features = features or Features()
        self._dispatcher = Dispatcher(fleet, admission, metrics, self._features, hand_over, look_up)
        self._watch_features()
        self._lists = ModelLists(fleet, self._features.names, list(self._features.cascades))
        self._log = log
        self._max_body_bytes = fleet.settings.max_body_bytes
        self._rate = OutputRate()
        origins = fleet.settings.cors_origin
        self._cors = Cors(origins, _SHOWN) if origins else None
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cut.add_done_callback(self._end_open)
        self._limits: set[asyncio.Timeout] = set()  # of the requests that are open

    def _watch_features(self) -> None:
        lanes, is_down = self._features.lanes, self._features.is_redis_down
        watch = self._metrics.watch
        if lanes is not None:
            watch("long_prompt_limit", "Long prompts a replica computes", lambda: lanes.limit)
            watch("long_prompts_waiting", "Long prompts that wait", lambda: lanes.num_waiting)
        if (tiers := self._features.tiers) is not None:
            for tier in LIMITED:
                what = f"requests of tier {tier}"
                watch(f"{tier}_limit", f"Open {what} for a replica", partial(tiers.limit, tier))
                watch(f"{tier}_open", f"Open {what}", partial(tiers.num_open, tier))
                watch(f"{tier}_waiting", f"Waiting {what}", partial(tiers.num_waiting, tier))
        if is_down is not None:
            watch("redis_down", "Whether Redis did not answer", lambda: float(is_down()))

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = served_path(scope["path"])
        found = find_route(path)
        route = "other" if found is None else found.route.metric or found.name
        client, origin = self._client(scope, receive, send)
        try:
            preflight = None
            if self._cors is not None:
                preflight = self._cors.preflight(scope["method"], scope["headers"], origin)
            if preflight is not None:
                route = _PREFLIGHT
                client.added += preflight
                await client.start(204, [])
                await client.finish()
            elif found is None:
                await self._answer(scope, path, client, origin)
            else:
                _check(scope, path, found)
                await self._dispatch(scope, path, receive, client, origin)
        except ClientGone:
            return
        except Refusal as refusal:
            if refusal.status == 503 and refusal.retry_after_s is None:
                refusal.retry_after_s = self._admission.retry_after_s()
            if refusal.code == DRAINS:  # by another connection it may reach another router
                client.added.append(_CLOSE)
            self._metrics.refused.labels(refusal.code).inc()
            await client.refuse(refusal)
        finally:
            client.unwatch()
            if client.was_given_up:
                self._metrics.slow_clients.inc()
            self._metrics.requests.labels(route, str(client.status or "gone")).inc()

    async def refuse(
        self, scope: dict[str, Any], receive: Receive, send: Send, refusal: Refusal
    ) -> None:
        """Answer a request with an error, and look at nothing else of it."""
        client, _ = self._client(scope, receive, send)
        try:
            await client.refuse(refusal)
        finally:
            client.unwatch()

    def _client(
        self, scope: dict[str, Any], receive: Receive, send: Send
    ) -> tuple[ClientResponse, str | None]:
        """Return the response to a request, and its Origin if that is one of --cors-origin."""
        form, abort = form_of(served_path(scope["path"])), scope.get("quire.abort")
        client = ClientResponse(receive, send, form, abort, scope.get(WRITER))
        if self._cors is None:
            return client, None
        origin = self._cors.origin_of(scope["headers"])
        client.cors = self._cors.headers(origin)
        return client, origin

    async def _answer(
        self, scope: dict[str, Any], path: str, client: ClientResponse, origin: str | None
    ) -> None:
        """Answer what no replica is asked for."""
        method = scope["method"]
        if method != "GET":
            if path in ("/health", "/metrics", "/v1/models", *LISTS):
                raise Refusal(405, "method_not_allowed", f"{path} takes GET, not {method}")
            raise _unknown(method, path)
        elif path == "/health":
            await self._health(client)
        elif path == "/metrics":
            headers = [(b"content-type", CONTENT_TYPE.encode())]
            await client.whole(200, headers, self._metrics.text())
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models").strip("/")
            await client.whole(200, _JSON, msgspec.json.encode(self._lists.openai(name)))
        elif path in LISTS:
            headers, query = _forwarded(scope, origin), scope["query_string"]
            status, body = await self._lists.ollama(path, headers, query)
            await client.whole(status, _JSON, body)
        else:
            raise _unknown(method, path)

    async def _dispatch(
        self,
        scope: dict[str, Any],
        path: str,
        receive: Receive,
        client: ClientResponse,
        origin: str | None,
    ) -> None:
        headers = _forwarded(scope, origin)
        sent = form_of(path).key_in(headers)
        try:
            key = self._admission.admit(headers, sent, asyncio.get_running_loop().time())
        except Refusal as refusal:
            if refusal.code == DRAINS:
                await self._discard(scope, receive)
            raise
        reservation: Reservation | None = None
        request: RoutedRequest | None = None
        limit = asyncio.timeout(BODY_TIME_S)
        self._limits.add(limit)
        try:
            async with limit:
                raw = await self._body(scope, receive)
                if self.cut.done():
                    raise _stopped("the answer")
                limit.reschedule(None)
                client.watch()
                request = RoutedRequest(
                    path,
                    headers,
                    raw,
                    method=scope["method"].encode(),
                    query=scope["query_string"],
                )
                order = read_order(request, self._features.summaries)
                reservation = await self._reserve(sent, request, limit)
                if self.cut.done():
                    raise _stopped("the answer")
                await self._dispatcher.answer(request, client, key, order)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._out_of_time(client, is_read=request is not None) from None
        finally:
            self._limits.discard(limit)
            self._admission.leave(key)
            if reservation is not None and request is not None:
                await self._settle(reservation, request, client)

    def _end_open(self, _: object) -> None:
        """End what is open: the router stops."""
        for limit in self._limits:
            with contextlib.suppress(RuntimeError):  # it has expired just now
                limit.reschedule(0.0)

    def _out_of_time(self, client: ClientResponse, *, is_read: bool) -> Refusal:
        """Return the error of a request that ends before its answer. The connection of one with a
        body that does not come is closed."""
        if is_read:
            return _stopped("the answer")
        if self.cut.done():
            return _stopped("the request")
        client.added.append(_CLOSE)
        return Refusal(408, "timeout", late_body(BODY_TIME_S))

    async def _reserve(
        self, key: bytes, request: RoutedRequest, limit: asyncio.Timeout
    ) -> Reservation | None:
        """Take the tokens that a request may use from its key's quota. Raises Refusal. It is not
        cut meanwhile: tokens that are taken have to be settled."""
        quotas = self._features.quotas
        if quotas is None:
            return None
        self._limits.discard(limit)
        reservation = await quotas.reserve(key, request.reserved_tokens)
        self._limits.add(limit)
        if reservation is not None:
            self._metrics.quota_tokens.labels("reserved").inc(reservation.tokens)
        return reservation

    async def _settle(
        self, reservation: Reservation, request: RoutedRequest, client: ClientResponse
    ) -> None:
        """Charge what a request has used. One that was refused, or that its client left before a
        replica had it, has used nothing but what was computed for it before."""
        now_s = asyncio.get_running_loop().time()
        is_left = client.is_gone and not client.started
        was_had = request.sent_s or request.is_prefilled
        is_refused = client.status >= 400 or not (client.started or (is_left and was_had))
        if not is_refused:
            request.took(now_s, self._rate, is_left=is_left)
        used = request.replaced_tokens if is_refused else request.used_tokens()
        if is_left:
            used += request.left_tokens(now_s, self._rate)
        await reservation.settle(used)
        self._metrics.quota_tokens.labels("used").inc(used)

    async def _body(self, scope: dict[str, Any], receive: Receive) -> bytes:
        """Read the body. One that is announced to be too large is not read; of another one no more
        than the limit is held. Raises Refusal."""
        announced = header_in(scope["headers"], b"content-length")[:LENGTH_DIGITS]
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise self._too_large(announced.decode())
        pieces, num_bytes = list[bytes](), 0
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self._max_body_bytes:
                raise self._too_large(f"more than {self._max_body_bytes}")
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def _discard(self, scope: dict[str, Any], receive: Receive) -> None:
        """Wait for the body of a request after which the connection is closed: a client that still
        writes would see a broken connection, and no answer. Raises ClientGone."""
        with contextlib.suppress(TimeoutError, Refusal):
            async with asyncio.timeout(_DISCARD_S):
                await self._body(scope, receive)

    def _too_large(self, found: str) -> Refusal:
        return Refusal(413, "body_too_large", large_body(found, self._max_body_bytes))

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
                "available": one.is_up,
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


def _forwarded(scope: dict[str, Any], origin: str | None) -> list[tuple[bytes, bytes]]:
    """Return the request's headers, with its client's address added to x-forwarded-for.

    origin: that the router accepts, which replicas need not accept: it is left out.
    """
    headers: list[tuple[bytes, bytes]] = [(name, value) for name, value in scope["headers"]]
    if origin is not None:
        headers = [header for header in headers if header[0] != b"origin"]
    client = scope.get("client")
    if client is not None:
        before = [value for name, value in headers if name == b"x-forwarded-for"]
        headers = [header for header in headers if header[0] != b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*before, client[0].encode()])))
    return headers


def _check(scope: dict[str, Any], path: str, found: FoundRoute) -> None:
    """Refuse a method that replicas do not take. Raises Refusal."""
    method, allowed = scope["method"], found.route.methods
    if method not in allowed:
        shown = ", ".join(allowed)
        raise Refusal(405, "method_not_allowed", f"{path[:100]} takes {shown}, not {method}")


def _stopped(what: str) -> Refusal:
    return Refusal(503, "shutting_down", f"the router has stopped before {what} was complete")


def _unknown(method: str, path: str) -> Refusal:
    shown = path[:100]
    if why := reason_not_routed(path):
        why = f"the router does not route {shown}: {why}"
        return Refusal(501, "not_routed", why, is_final=True)
    return Refusal(
        404,
        "unknown_url",
        f"there is no {method} {shown!r} here; routed are {', '.join(ROUTES)}, and there are "
        "/v1/models, /health and /metrics",
    )
