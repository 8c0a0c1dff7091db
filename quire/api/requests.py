"""GET /v1/requests/{id}, its abort, and its stream resumed: requests by id, for who sent them.

`id` is the answer's id, or the `x-request-id` its caller gave. Knows no model and no engine. Always
holds: a request is found only with the key it was sent with; for anybody else there is none.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.errors import ResumeGone
from quire.api.events import place_of
from quire.api.live import Live
from quire.api.serving import Serving
from quire.api.stream import FollowStream
from quire.base.show import show


class Requests:
    """The routes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def get(self, request: Request) -> Response:
        """What a request does: its state, its tokens so far."""
        return _json(shown(self._found(request)))

    async def abort(self, request: Request) -> Response:
        """End a request; `aborted` is false where it had ended before."""
        live = self._found(request)
        aborted = self._serving.live.abort(live)
        return _json({"id": live.id, "object": "request", "aborted": aborted})

    async def stream(self, request: Request) -> Response:
        """The events of a resumable stream behind Last-Event-ID, or all of them without one."""
        live = self._found(request)
        telling = self._serving.tellings.find(live.id)
        if telling is None:
            raise ResumeGone(
                f"the stream of request {show(live.id)} is not kept; ask for it with "
                'stream_options: {"resumable": true}, and come back within --resume-seconds'
            )
        last_id = request.headers.get("last-event-id")
        after = 0
        if last_id is not None:
            of_request, after = place_of(last_id)
            if of_request != live.id:
                raise ResumeGone(
                    f"Last-Event-ID is {show(last_id)}, of another request than {show(live.id)}"
                )
        headers = {"x-request-id": live.id}
        return FollowStream(self._serving, telling, headers, after=after, resumes=True)

    def _found(self, request: Request) -> Live:
        return self._serving.live.find(request.path_params["id"], request.state.key)


def shown(live: Live) -> dict[str, object]:
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
