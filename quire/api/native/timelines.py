"""GET /v1/requests/{id}/timeline: where the time of a request went, for its sender and for admins.

`id` is the answer's id, or the `x-request-id` that the client gave. The engine keeps the last steps
and requests (--timeline-steps); obs/timeline.py explains them. Always holds: a request is found
only with the key that it was sent with, or with an admin key; of other requests a timeline has
times, and their counts only where all requests have one sender or an admin asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.http.errors import UnknownRequest
from quire.api.http.parameterless import refuse_query
from quire.api.server_state import RequestRegistry, ServerState
from quire.base.cache_usage import for_strangers
from quire.base.show import show
from quire.base.timeline import MAX_HISTORIES, TimelineReport
from quire.engine.process.messages import TimelinesReported
from quire.obs.timeline import explain

Forward = Callable[[Request], Awaitable[Response | None]]
_MINUTE_MS = 60_000.0


class TimelineRoutes:
    """The route. forward: to the other API processes, for a request that is not of this one;
    returns None if none does."""

    def __init__(self, server_state: ServerState, forward: Forward | None = None) -> None:
        self._server_state = server_state
        self._forward = forward

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/v1/requests/{id}/timeline", self.get, methods=["GET"])]

    async def get(self, request: Request) -> Response:
        """Return the timeline of each stream of a request."""
        refuse_query(request)
        id_or_name, state = request.path_params["id"], self._server_state
        id_ = _id_of(request, state.requests)
        if not id_ and self._forward is not None:
            forwarded = await self._forward(request)
            if forwarded is not None:
                return forwarded
        engine = state.loaded_engine or state.engine()
        answer = await engine.timelines(id_ or "?")
        if not (id_ and answer.reports):
            raise UnknownRequest(_why_none(id_or_name, answer))
        block_size, is_admin = engine.card.block_size, request.state.is_admin
        content = await asyncio.to_thread(
            _timeline_json,
            id_,
            answer,
            block_size=block_size,
            for_others=state.has_several_users and not is_admin,
        )
        return Response(
            content, headers={"cache-control": "no-store"}, media_type="application/json"
        )


def _id_of(request: Request, registry: RequestRegistry) -> str:
    """Return the id of the request with the path's id, or of the last one with this name; "" for
    none.

    Admins find the requests of all keys.
    """
    id_or_name, named = request.path_params["id"], ""
    for id_, requester in registry.senders():
        if requester.key != request.state.key and not request.state.is_admin:
            continue
        if id_ == id_or_name:
            return id_
        if requester.name == id_or_name:
            named = id_
    return named


def _why_none(id_or_name: str, answer: TimelinesReported) -> str:
    """Return why there is no timeline, and how long timelines are kept."""
    if not answer.kept_steps:
        return "timelines are off: the server was started with --timeline-steps 0"
    minutes = f"{answer.kept_ms / _MINUTE_MS:.1f}"
    # A server that has computed little has kept it all: a time would say nothing.
    span = "" if minutes == "0.0" else f" (here the last {minutes} minutes)"
    return (
        f"no timeline of request {show(id_or_name)} is kept: no request was sent with this id and "
        f"key, or it is older than the last {answer.kept_steps:,} steps{span} or the last "
        f"{MAX_HISTORIES:,} requests; check the id and the key (--api-key of quire why), or start "
        "with a larger --timeline-steps"
    )


def _timeline_json(
    id_: str, answer: TimelinesReported, *, block_size: int, for_others: bool
) -> bytes:
    """Return the body. for_others: the timeline may not reveal the requests of other senders."""
    streams: list[dict[str, Any]] = []
    for report in answer.reports:
        shown = _without_others(report, block_size) if for_others else report
        prompt = _prompt_number(report.request_id)
        streams.append({"prompt": prompt} | explain(shown, shows_others=not for_others))
    is_done = all(report.finish_reason for report in answer.reports)
    return msgspec.json.encode(
        {
            "id": id_,
            "object": "request.timeline",
            "state": "done" if is_done else "open",
            "kept_steps": answer.kept_steps,
            "streams": streams,
        }
    )


def _without_others(report: TimelineReport, block_size: int) -> TimelineReport:
    if report.is_salted:  # its prefixes are shared with no other scope
        return report
    return replace(report, cache_use=for_strangers(report.cache_use, block_size))


def _prompt_number(request_id: str) -> int:
    """Return the number of the prompt that is part of an engine's id, as in `cmpl-1.2#7/0`."""
    number = request_id.partition("#")[0].rpartition(".")[2]
    return int(number) if "." in request_id and number.isdigit() else 0
