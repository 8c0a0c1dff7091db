"""GET /v1/requests/{id}, its abort and its resumed stream: requests by id, for their sender.

`id` is the answer's id, or the `x-request-id` that the client gave. Knows no model and no engine.
Always holds: a request is found only with the key that it was sent with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.fields import ignored_header
from quire.api.generation.request_context import query_names
from quire.api.http.errors import ResumeGone, UnknownRequest
from quire.api.server_state import OpenRequest, ServerState
from quire.api.streaming.resumable_stream import FollowStream, parse_event_id
from quire.base.show import show

Forward = Callable[[Request], Awaitable[Response | None]]


class RequestRoutes:
    """The routes. forward: asks the other API processes for a request that this one does not have;
    returns None if none has it."""

    def __init__(self, server_state: ServerState, forward: Forward | None = None) -> None:
        self._server_state = server_state
        self._forward = forward

    def routes(self) -> list[Route]:
        """Return all of them."""
        return [
            Route("/v1/requests/{id}", self.get, methods=["GET"]),
            Route("/v1/requests/{id}", self.abort, methods=["DELETE"]),
            Route("/v1/requests/{id}/abort", self.abort, methods=["POST"]),
            Route("/v1/requests/{id}/stream", self.stream, methods=["GET"]),
        ]

    async def get(self, request: Request) -> Response:
        """Return the state of a request and its token counts so far."""
        return await self._answered(request, lambda found: _json(shown(found)))

    async def abort(self, request: Request) -> Response:
        """End a request; `aborted` is false if it had ended before."""
        warns = self._server_state.config.unknown_fields == "warn"
        ignored = query_names(request, frozenset(), warns=warns)
        response = await self._answered(request, self._aborted)
        if ignored:
            response.headers["x-quire-ignored-fields"] = ignored_header(ignored)
        return response

    async def stream(self, request: Request) -> Response:
        """Return the events of a resumable stream after Last-Event-ID, or all without one."""
        last_id = request.headers.get("last-event-id")
        return await self._answered(request, lambda found: self._followed(found, last_id))

    def _aborted(self, found: OpenRequest) -> Response:
        aborted = self._server_state.requests.abort(found)
        return _json({"id": found.id, "object": "request", "aborted": aborted})

    def _followed(self, found: OpenRequest, last_id: str | None) -> Response:
        stream = self._server_state.resumable_streams.find(found.id)
        if stream is None:
            raise ResumeGone(
                f"the stream of request {show(found.id)} is not kept; ask for it with "
                'stream_options: {"resumable": true}, and come back within --resume-seconds'
            )
        after = 0
        if last_id is not None:
            of_request, after = parse_event_id(last_id)
            if of_request != found.id:
                raise ResumeGone(
                    f"Last-Event-ID is {show(last_id)}, of another request than {show(found.id)}"
                )
        headers = {"x-request-id": found.id}
        return FollowStream(self._server_state, stream, headers, after=after, resumes=True)

    async def _answered(
        self, request: Request, answer: Callable[[OpenRequest], Response]
    ) -> Response:
        """Answer for the request in the path, from the process that has it."""
        try:
            found = self._server_state.requests.find(request.path_params["id"], request.state.key)
        except UnknownRequest:
            forwarded = None if self._forward is None else await self._forward(request)
            if forwarded is None:
                raise
            return forwarded
        return answer(found)


def shown(found: OpenRequest) -> dict[str, object]:
    """Return the JSON object of a request."""
    progress = found.read_progress()
    return {
        "id": found.id,
        "object": "request",
        "name": found.requester.name or None,
        "route": found.route,
        "stream": found.is_stream,
        "created": int(found.created_s),
        "state": found.state,
        "error": found.error,
        "finish_reasons": progress.finish_reasons,
        "usage": {
            "prompt_tokens": progress.prompt_tokens,
            "completion_tokens": progress.completion_tokens,
            "cached_tokens": progress.cached_tokens,
        },
    }


def _json(content: dict[str, object]) -> Response:
    return Response(
        msgspec.json.encode(content),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )
