"""GET and DELETE /v1/responses/{id}, its cancellation and the items of its input.

A background response that runs is answered for by the process that runs it, all others from the
store. One that is stored as open, and that no process runs, has failed with its server. Always
holds: a response is found only with the key that it was made with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from quire.api.http.errors import ResumeGone
from quire.api.openai.responses.background import BackgroundResponse
from quire.api.openai.responses.fields import ENCRYPTED, INCLUDABLE
from quire.api.openai.responses.store import ResponseStore, StoredResponse
from quire.api.openai.responses.stored_items import (
    OPEN_STATUSES,
    listed_items,
    unknown_response,
    with_encrypted_content,
)
from quire.api.server_state import ServerState
from quire.api.streaming.resumable_stream import FollowStream
from quire.base.errors import InvalidParameter, QuireError
from quire.base.show import show

Forward = Callable[[Request], Awaitable[Response | None]]
Answer = Callable[[Request], Awaitable[Response | None]]

MAX_SEQUENCE_NUMBER = 2**31 - 2
MAX_LISTED, NUM_LISTED = 100, 20
ORDERS = ("asc", "desc")
_NO_IDS = ("input_tokens", "compact")


class _OneResponse(Route):
    """A route of one response; names of other routes of this API are no ids."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for this route."""
        if scope["path"].rpartition("/")[2] in _NO_IDS:
            return Match.NONE, {}
        return super().matches(scope)


class StoredRoutes:
    """The routes. forward: asks the other API processes for a background response; returns None if
    none runs it."""

    def __init__(
        self, server_state: ServerState, store: ResponseStore, forward: Forward | None = None
    ) -> None:
        self._server_state = server_state
        self._store = store
        self._forward = forward

    def routes(self) -> list[Route]:
        """Return all of them."""
        return [
            _OneResponse("/v1/responses/{id}", self.get, methods=["GET"]),
            _OneResponse("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    def private_routes(self) -> list[Route]:
        """Return the routes of the private socket: of the background responses of this process."""
        return [
            Route("/v1/responses/{id}", self._private(self._get_running), methods=["GET"]),
            Route("/v1/responses/{id}", self._private(self._delete_running), methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self._private(self._cancel), methods=["POST"]),
        ]

    async def get(self, request: Request) -> Response:
        """Return a response, or its events after a number (stream, starting_after)."""
        after = _first_event(request)
        answered = await self._get_running(request)
        if answered is not None:
            return answered
        found = await self._found(request)
        response = msgspec.json.decode(found.response)
        is_open = response["status"] in OPEN_STATUSES
        if is_open or (after is not None and response["background"]):
            forwarded = await self._forwarded(request)
            if forwarded is not None:
                return forwarded
        if after is not None:
            raise _no_events(response)
        if is_open:
            found = await self._save_failed(request.state.key, found, response)
        return json_of(_shown(request, found.response))

    async def delete(self, request: Request) -> Response:
        """Remove a response; a background response is cancelled before."""
        query_of(request, ())
        answered = await self._delete_running(request)
        if answered is not None:
            return answered
        found = await self._found(request)
        if msgspec.json.decode(found.response)["status"] in OPEN_STATUSES:
            forwarded = await self._forwarded(request)
            if forwarded is not None:
                return forwarded
        return await self._deleted(request)

    async def cancel(self, request: Request) -> Response:
        """End a background response; one that has ended stays as it is."""
        query_of(request, ())
        answered = await self._cancel(request)
        if answered is not None:
            return answered
        found = await self._found(request)
        response = msgspec.json.decode(found.response)
        if not response["background"]:
            raise InvalidParameter(
                f"response {show(found.id)} was made without background: true, and has ended; only "
                "background responses can be cancelled",
                param="id",
            )
        if response["status"] in OPEN_STATUSES:
            forwarded = await self._forwarded(request)
            if forwarded is not None:
                return forwarded
            found = await self._save_failed(request.state.key, found, response)
        return json_of(found.response)

    async def input_items(self, request: Request) -> Response:
        """Return the items of the input, without those of earlier responses."""
        return page_of_items(request, listed_items(await self._found(request)))

    def _private(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            found = await answer(request)
            if found is None:
                raise unknown_response(request.path_params["id"])
            return found

        return answered

    def _background(self, request: Request) -> BackgroundResponse | None:
        """Return a background response of this process with events that are kept."""
        kept = self._server_state.resumable_streams.find(request.path_params["id"])
        if not isinstance(kept, BackgroundResponse):
            return None
        return kept if kept.request.requester.key == request.state.key else None

    async def _get_running(self, request: Request) -> Response | None:
        background, after = self._background(request), _first_event(request)
        if background is None or (after is None and not background.is_running):
            return None
        if after is None:
            return json_of(_shown(request, msgspec.json.encode(background.snapshot())))
        headers = {"x-request-id": background.id}
        return FollowStream(self._server_state, background, headers, after=after, resumes=True)

    async def _delete_running(self, request: Request) -> Response | None:
        background = self._background(request)
        if background is None:
            return None
        await background.cancel()
        self._server_state.resumable_streams.drop(background.id)
        return await self._deleted(request)

    async def _cancel(self, request: Request) -> Response | None:
        background = self._background(request)
        if background is None or not background.is_running:
            return None
        await background.cancel()
        return json_of(msgspec.json.encode(background.snapshot()))

    async def _forwarded(self, request: Request) -> Response | None:
        return None if self._forward is None else await self._forward(request)

    async def _deleted(self, request: Request) -> Response:
        id_ = request.path_params["id"]
        if not await self._store.delete(request.state.key, id_):
            raise unknown_response(id_)
        return json_of(msgspec.json.encode({"id": id_, "object": "response", "deleted": True}))

    async def _save_failed(
        self, key: bytes, found: StoredResponse, response: dict[str, Any]
    ) -> StoredResponse:
        """Store a response as failed that no process runs any more."""
        message = "the server ended before the response did"
        error = {"code": "server_error", "message": message, "param": None, "type": "server_error"}
        response |= {"status": "failed", "error": error}
        failed = structs.replace(found, response=msgspec.json.encode(response))
        await self._store.save(key, failed)
        return failed

    async def _found(self, request: Request) -> StoredResponse:
        id_ = request.path_params["id"]
        found = await self._store.find(request.state.key, id_)
        if found is None:
            raise unknown_response(id_)
        return found


def page_of_items(request: Request, items: list[dict[str, Any]]) -> Response:
    """Return the page of items that a query asks for. Raises InvalidParameter."""
    query = query_of(request, ("limit", "order", "after", "include", "include[]"))
    limit, order = _limit(query), query.get("order", "desc")
    if order not in ORDERS:
        raise InvalidParameter(
            f"order is {show(order)}; {' and '.join(ORDERS)} are allowed", param="order"
        )
    if order == "desc":
        items.reverse()
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise InvalidParameter(
                f"after is {show(query['after'])}, which is none of these items; give the last_id "
                "of the page before",
                param="after",
            )
        items = items[ids.index(query["after"]) + 1 :]
    page = items_shown(request, items[:limit])
    return json_of(
        msgspec.json.encode(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )
    )


def items_shown(request: Request, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items with the additions that a query includes."""
    asked = (*request.query_params.getlist("include"), *request.query_params.getlist("include[]"))
    return with_encrypted_content(items) if ENCRYPTED in asked else items


def _shown(request: Request, response: bytes) -> bytes:
    """Return the JSON of a response with the additions that a query includes."""
    if not request.query_params.getlist("include") and "include[]" not in request.query_params:
        return response
    found = msgspec.json.decode(response)
    return msgspec.json.encode({**found, "output": items_shown(request, found["output"])})


def query_of(request: Request, allowed: tuple[str, ...]) -> Mapping[str, str]:
    """Return the parameters of the query. Raises InvalidParameter for others, and for inclusions
    that no response has."""
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            known = ", ".join(name for name in allowed if name != "include[]")
            raise InvalidParameter(
                f"{show(name)} is a parameter of the query, and this route takes "
                f"{known or 'none'}; leave it out",
                param=name[:64],
            )
        if name in ("include", "include[]") and value not in INCLUDABLE:
            raise InvalidParameter(
                f"include is {show(value)}; {', '.join(INCLUDABLE)} are allowed",
                param="include",
            )
    return request.query_params


def _first_event(request: Request) -> int | None:
    """Return how many events precede those that are asked for; None if none are."""
    query = query_of(
        request, ("include", "include[]", "stream", "starting_after", "include_obfuscation")
    )
    for name in ("stream", "include_obfuscation"):
        if query.get(name, "false") not in ("true", "false"):
            raise InvalidParameter(
                f"{name} is {show(query[name])}; true or false is allowed", param=name
            )
    if query.get("stream") == "true":
        if "starting_after" not in query:
            return 0
        return whole_of(query, "starting_after", 0, MAX_SEQUENCE_NUMBER) + 1
    if "starting_after" in query:
        raise InvalidParameter(
            "starting_after is given without stream=true; add that, or leave it out",
            param="starting_after",
        )
    return None


def _no_events(response: dict[str, Any]) -> QuireError:
    """Return the error for events that are not kept."""
    if response["background"]:
        return ResumeGone(
            f"the events of response {show(response['id'])} are not kept any more "
            "(--resume-seconds after its end); leave stream out to get the whole response"
        )
    return InvalidParameter(
        f"response {show(response['id'])} was made without background: true, and only the events "
        "of background responses are kept; leave stream out to get the whole response",
        param="stream",
    )


def whole_of(query: Mapping[str, str], name: str, low: int, high: int) -> int:
    """Return a whole number of a query. Raises InvalidParameter."""
    text = query[name]
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(high))
    if not is_number or not low <= int(text) <= high:
        raise InvalidParameter(
            f"{name} is {show(text)}; a whole number from {low} to {high} is allowed", param=name
        )
    return int(text)


def json_of(body: bytes) -> Response:
    """Return a body of JSON as a response."""
    return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")


def _limit(query: Mapping[str, Any]) -> int:
    return whole_of(query, "limit", 1, MAX_LISTED) if "limit" in query else NUM_LISTED
