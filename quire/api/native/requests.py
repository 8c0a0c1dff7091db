"""GET /v1/requests/{id}, its abort, and its stream resumed: requests by id, for who sent them.

`id` is the answer's id, or the `x-request-id` its caller gave. Knows no model and no engine. Always
holds: a request is found only with the key it was sent with; for anybody else there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.fields import ignored_header
from quire.api.generation.request_context import query_names
from quire.api.generation.request_registry import OpenRequest
from quire.api.http.errors import ResumeGone, UnknownRequest
from quire.api.server_state import ServerState
from quire.api.streaming.event_stream import FollowStream
from quire.api.streaming.sse import place_of
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.show import show


class RequestRoutes:
    """The routes. peers: who may know a request that this process does not."""

    def __init__(self, serving: ServerState, peers: SiblingWorkers | None = None) -> None:
        self._serving = serving
        self._peers = peers

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/requests/{id}", self.get, methods=["GET"]),
            Route("/v1/requests/{id}", self.abort, methods=["DELETE"]),
            Route("/v1/requests/{id}/abort", self.abort, methods=["POST"]),
            Route("/v1/requests/{id}/stream", self.stream, methods=["GET"]),
        ]

    async def get(self, request: Request) -> Response:
        """What a request does: its state, its tokens so far."""
        return await self._answered(request, lambda live: _json(shown(live)))

    async def abort(self, request: Request) -> Response:
        """End a request; `aborted` is false where it had ended before."""
        warns = self._serving.config.unknown_fields == "warn"
        ignored = query_names(request, frozenset(), warns=warns)
        response = await self._answered(request, self._aborted)
        if ignored:
            response.headers["x-quire-ignored-fields"] = ignored_header(ignored)
        return response

    async def stream(self, request: Request) -> Response:
        """The events of a resumable stream behind Last-Event-ID, or all of them without one."""
        last_id = request.headers.get("last-event-id")
        return await self._answered(request, lambda live: self._followed(live, last_id))

    def _aborted(self, live: OpenRequest) -> Response:
        aborted = self._serving.live.abort(live)
        return _json({"id": live.id, "object": "request", "aborted": aborted})

    def _followed(self, live: OpenRequest, last_id: str | None) -> Response:
        telling = self._serving.tellings.find(live.id)
        if telling is None:
            raise ResumeGone(
                f"the stream of request {show(live.id)} is not kept; ask for it with "
                'stream_options: {"resumable": true}, and come back within --resume-seconds'
            )
        after = 0
        if last_id is not None:
            of_request, after = place_of(last_id)
            if of_request != live.id:
                raise ResumeGone(
                    f"Last-Event-ID is {show(last_id)}, of another request than {show(live.id)}"
                )
        headers = {"x-request-id": live.id}
        return FollowStream(self._serving, telling, headers, after=after, resumes=True)

    async def _answered(
        self, request: Request, answer: Callable[[OpenRequest], Response]
    ) -> Response:
        """The answer for the request that is asked for, by the process that has it."""
        try:
            live = self._serving.live.find(request.path_params["id"], request.state.key)
        except UnknownRequest:
            passed = None if self._peers is None else await self._peers.pass_on(request)
            if passed is None:
                raise
            return passed
        return answer(live)


def shown(live: OpenRequest) -> dict[str, object]:
    """A request as it is told."""
    progress = live.progress
    return {
        "id": live.id,
        "object": "request",
        "name": live.asker.name or None,
        "route": live.route,
        "stream": live.is_stream,
        "created": int(live.created_s),
        "state": live.state,
        "error": live.error,
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
