"""A second HTTP dialect over the neutral code: its own path, errors, events and key header."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from quire.api.app import build_app, routes_of
from quire.api.generation.choice_streams import Choice, Prompt, PromptState, Usage
from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.generation.request_context import encode
from quire.api.http.dialect import Dialect, Headers
from quire.api.http.errors import ErrorReport
from quire.api.http.middleware import RequestMiddleware
from quire.api.openai.dialect import OPENAI
from quire.api.openapi.operations import OPERATIONS
from quire.base.errors import InvalidParameter, NotAuthorized, WorkerError
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta
from tests.unit.api import fake_engine
from tests.unit.api.fake_engine import Site
from tests.unit.api.said import Reply

PATH = "/lines/say"


class LineFraming:
    """One line of JSON for each event, without ids."""

    media_type = "application/x-ndjson"
    heartbeat = b"\n"

    def event(self, number: int, data: bytes) -> bytes:
        return data + b"\n"

    def error(self, number: int, data: bytes) -> bytes:
        return b"! " + data + b"\n"

    def end(self, number: int) -> bytes:
        return b""


class LineDialect:
    challenge = None

    def read_key(self, headers: Headers) -> bytes:
        for name, value in headers:
            if name == b"x-line-key":
                return value
        raise NotAuthorized("send the key as x-line-key")

    def error(self, report: ErrorReport) -> tuple[int, Any]:
        status = 529 if report.code == "shutting_down" else report.status
        return status, {"fault": report.code, "reason": report.message, "at": report.param}

    def framing(self, request_id: str) -> LineFraming:
        return LineFraming()


class LineWriter:
    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        return {"said": choices[0][0].text, "tokens": usage.completion_tokens}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        yield {"more": delta.text}

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any]:
        return {"more": text}

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        return {"progress": progress.processed}

    def so_far(self, usage: Usage) -> dict[str, Any]:
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        return {"tokens": usage.completion_tokens}


async def _read(asked: GenerationRequest) -> GenerationJob:
    text = asked.given.get("text")
    if not isinstance(text, str):
        raise InvalidParameter("text is missing; give a text", param="text")
    token_ids = await encode(asked.context, text, add_special_tokens=False, param="text")
    sampling = SamplingParams(max_tokens=8, seed=1)
    return GenerationJob(
        prompts=[Prompt(token_ids=token_ids, sampling=sampling)], writer=LineWriter()
    )


def _site(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Site:
    monkeypatch.setattr(fake_engine, "check_said", lambda *_: None)  # the document has no /lines
    site = Site(**settings)
    dialect: Dialect = LineDialect()
    route = GenerationRoute(
        honoured=frozenset({"text", "stream"}), id_prefix="line", read=_read, dialect=dialect
    )

    async def say(request: Request) -> Response:
        return await generate(site.serving, request, route)

    routes = [Route(PATH, say, methods=["POST"]), *routes_of(site.serving)]
    router = Router(routes, redirect_slashes=False)
    site.app = RequestMiddleware(router, site.serving, OPENAI, dialects={"/lines": dialect})
    return site


def _ask(
    monkeypatch: pytest.MonkeyPatch,
    body: Any,
    headers: dict[str, str] | None = None,
    path: str = PATH,
    error: Exception | None = None,
    **settings: Any,
) -> Reply:
    async def ask() -> Reply:
        site = _site(monkeypatch, **settings)
        site.engine.fails_with, site.engine.fails_after = error, 1
        return await site.post(path, body, headers=headers)

    return asyncio.run(ask())


def _generation_route(route: Route) -> GenerationRoute | None:
    """Return what the object that serves a route passes to `generate`."""
    owner = getattr(route.endpoint, "__self__", None)
    held = [] if owner is None else vars(owner).values()
    return next((value for value in held if isinstance(value, GenerationRoute)), None)


def test_each_generation_route_has_the_dialect_of_its_path() -> None:
    async def dialects() -> dict[str, tuple[Dialect, Dialect]]:
        serving = Site().serving
        app = build_app(serving)
        assert isinstance(app, RequestMiddleware)
        pairs = {route.path: _generation_route(route) for route in routes_of(serving)}
        return {
            path: (generation.dialect, app._dialect_of(path))
            for path, generation in pairs.items()
            if generation is not None
        }

    found = asyncio.run(dialects())
    streamed = {name for name, row in OPERATIONS.items() if row.event and row.body is not None}
    assert {f"POST {path}" for path in found} == streamed
    assert all(of_route is of_path for of_route, of_path in found.values())


def test_a_whole_answer_has_the_dialects_form(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi"})
    assert (reply.status, reply.json) == (200, {"said": "Hello", "tokens": 2})


def test_a_stream_has_the_dialects_framing_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi", "stream": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert lines == [{"more": "Hel"}, {"more": "lo"}, {"tokens": 2}]


def test_an_error_in_a_stream_has_the_dialects_form(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi", "stream": True}, error=WorkerError("it died"))
    first, last = reply.body.splitlines()
    assert json.loads(first) == {"more": "Hel"}
    assert last.startswith(b"! ")
    assert json.loads(last[2:]) == {"fault": "worker_error", "reason": "it died", "at": None}


@pytest.mark.parametrize(
    ("body", "status", "fault", "at"),
    [({}, 400, "invalid_value", "text"), (b"{", 400, None, None)],
)
def test_rejections_have_the_dialects_body(
    monkeypatch: pytest.MonkeyPatch, body: Any, status: int, fault: str | None, at: str | None
) -> None:
    reply = _ask(monkeypatch, body)
    assert (reply.status, reply.json["fault"], reply.json["at"]) == (status, fault, at)


def test_errors_before_a_route_have_the_dialect_of_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _ask(monkeypatch, {}, path="/lines/nowhere").json["fault"] == "unknown_url"
    assert _ask(monkeypatch, {}, path="/linesman").json["error"]["code"] == "unknown_url"


def test_the_dialect_may_change_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> Reply:
        site = _site(monkeypatch)
        site.serving.drain()
        return await site.post(PATH, {"text": "hi"})

    assert asyncio.run(ask()).status == 529


def test_each_dialect_reads_the_key_from_its_own_header(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(headers: dict[str, str], path: str = PATH, body: Any = None) -> int:
        body = body or {"text": "hi"}
        return _ask(monkeypatch, body, headers=headers, path=path, api_key=("k",)).status

    assert status({"x-line-key": "k"}) == 200
    assert status({"x-line-key": "other"}) == 401
    assert status({"authorization": "Bearer k"}) == 401
    completion = {"prompt": "hi"}
    assert status({"authorization": "Bearer k"}, "/v1/completions", completion) == 200
    assert status({"x-line-key": "k"}, "/v1/completions", completion) == 401


def test_a_rejected_key_has_the_dialects_body(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi"}, api_key=("k",))
    assert reply.status == 401
    assert reply.json["fault"] == "invalid_api_key"
    assert "www-authenticate" not in reply.headers
