"""Another HTTP API over the neutral code (line_api.py): paths, errors, events and key header."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route, Router

from quire.api.app import build_app, routes_of
from quire.api.generation.generate import GenerationRoute
from quire.api.http.dialect import Dialect
from quire.api.http.middleware import RequestMiddleware
from quire.api.openai.dialect import OPENAI
from quire.api.openapi.document import served
from quire.api.openapi.operations import OPERATIONS
from quire.base.errors import WorkerError
from quire.text.chat_template import ChatTemplate
from tests.unit.api import fake_engine
from tests.unit.api.fake_engine import Site
from tests.unit.api.http.line_api import DIALECT, RECITE, TALK_TEMPLATE, TOP, line_routes
from tests.unit.api.said import Reply

PATH = "/lines/fake:say"


def _site(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Site:
    monkeypatch.setattr(fake_engine, "check_said", lambda *_: None)  # the document has no /lines
    site = Site(**settings)
    routes = [*line_routes(site.server_state), *routes_of(site.server_state)]
    router = Router(routes, redirect_slashes=False)
    site.app = RequestMiddleware(router, site.server_state, OPENAI, dialects={TOP: DIALECT})
    return site


def _ask(
    monkeypatch: pytest.MonkeyPatch,
    body: Any,
    headers: dict[str, str] | None = None,
    path: str = PATH,
    query: bytes = b"",
    error: Exception | None = None,
    says: str | None = None,
    **settings: Any,
) -> Reply:
    async def ask() -> Reply:
        site = _site(monkeypatch, **settings)
        if says is not None:
            site.engine.script = tuple(says)
            site.engine.template = ChatTemplate(TALK_TEMPLATE, variables={})
        site.engine.fails_with, site.engine.fails_after = error, 1
        return await site.post(path, body, headers=headers, query=query)

    return asyncio.run(ask())


def _generation_route(route: Route) -> GenerationRoute | None:
    """Return what the object or the closure that serves a route passes to `generate`."""

    def held() -> Iterator[Any]:
        yield from vars(getattr(route.endpoint, "__self__", None) or object).values()
        for cell in getattr(route.endpoint, "__closure__", None) or ():
            yield cell.cell_contents

    return next((value for value in held() if isinstance(value, GenerationRoute)), None)


def test_each_generation_route_has_the_dialect_of_its_path() -> None:
    async def dialects() -> dict[str, tuple[Dialect, Dialect]]:
        server_state = Site().server_state
        app = build_app(server_state)
        assert isinstance(app, RequestMiddleware)
        return {
            f"{method} {path}": (generation.dialect, app._dialect_of(path))
            for route in routes_of(server_state)
            for method, path in served([route])
            if (generation := _generation_route(route)) is not None
        }

    found = asyncio.run(dialects())
    assert found.keys() <= OPERATIONS.keys()
    assert {name for name, row in OPERATIONS.items() if row.event and row.body} <= found.keys()
    assert "POST /v1/embeddings" in found
    assert all(of_route is of_path for of_route, of_path in found.values())


def test_a_whole_answer_has_the_dialects_form(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi"})
    assert (reply.status, reply.json) == (200, {"said": "Hello", "tokens": 2})
    assert reply.headers["x-line-id"] == reply.headers["x-request-id"]


def test_a_stream_has_the_dialects_framing_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi", "stream": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    kinds, lines = zip(*(line.split(b"{", 1) for line in reply.body.splitlines()), strict=True)
    assert kinds == (b"text", b"text", b"")
    assert [json.loads(b"{" + line) for line in lines] == [
        {"type": "text", "more": "Hel"},
        {"type": "text", "more": "lo"},
        {"tokens": 2},
    ]


def test_a_dialect_renders_and_parses_conversations_of_its_own_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = 'I look. <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    reply = _ask(
        monkeypatch,
        {"talk": [["user", "Where?"]], "stream": True},
        says=answer,
    )
    assert reply.status == 200, reply.body
    *parts, _ = (json.loads(b"{" + line.split(b"{", 1)[1]) for line in reply.body.splitlines())
    content = "".join(part["more"] for part in parts if part["type"] == "content")
    arguments = "".join(part["more"] for part in parts if part["type"] == "arguments")
    (call,) = (part for part in parts if part["type"] == "call")
    assert (content.strip(), call["more"], json.loads(arguments)) == ("I look.", "look", {"at": 1})
    assert call["id"].startswith("call_")


def test_an_error_in_a_stream_has_the_dialects_form(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi", "stream": True}, error=WorkerError("it died"))
    first, last = reply.body.splitlines()
    assert json.loads(first.removeprefix(b"text")) == {"type": "text", "more": "Hel"}
    assert last.startswith(b"! ")
    assert json.loads(last[2:]) == {
        "fault": "worker_error",
        "reason": "it died",
        "at": None,
        "request": reply.headers["x-request-id"],
    }


@pytest.mark.parametrize(
    ("body", "status", "fault", "at"),
    [({}, 400, "invalid_value", "text"), (b"{", 400, None, None)],
)
def test_rejections_have_the_dialects_body(
    monkeypatch: pytest.MonkeyPatch, body: Any, status: int, fault: str | None, at: str | None
) -> None:
    reply = _ask(monkeypatch, body)
    assert (reply.status, reply.json["fault"], reply.json["at"]) == (status, fault, at)
    assert reply.json["request"] == reply.headers["x-request-id"]


def test_errors_before_a_route_have_the_dialect_of_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _ask(monkeypatch, {}, path="/lines/nowhere").json["fault"] == "unknown_url"
    assert _ask(monkeypatch, {}, path="/linesman").json["error"]["code"] == "unknown_url"


def test_the_dialect_may_change_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> Reply:
        site = _site(monkeypatch)
        site.server_state.lifecycle.drain()
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


def test_the_model_is_read_from_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = _ask(monkeypatch, {"text": "hi"}, path="/lines/other:say")
    assert (reply.status, reply.json["fault"], reply.json["at"]) == (
        404,
        "model_not_found",
        "model",
    )
    reply = _ask(monkeypatch, {"text": "hi", "model": "fake"})
    assert (reply.status, reply.json["at"]) == (400, "model"), "the path has it"


def test_parameters_of_the_query_are_read_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = _ask(monkeypatch, {"text": "hi"}, query=b"shout=true")
    assert reply.json == {"said": "HELLO", "tokens": 2}
    reply = _ask(monkeypatch, {"text": "hi"}, query=b"shout=true&alt=sse")
    assert (reply.status, reply.json["at"]) == (400, "alt")
    assert '"alt" is a parameter of the query, and this route takes shout' in reply.json["reason"]
    reply = _ask(monkeypatch, {"text": "hi"}, query=b"shout=true&alt=x", unknown_fields="warn")
    assert (reply.json["said"], reply.headers["x-quire-ignored-fields"]) == ("HELLO", "alt")


def test_a_route_may_always_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    path = RECITE.replace("{model}", "fake")
    reply = _ask(monkeypatch, {"text": "hi"}, path=path, query=b"shout=true")
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line.removeprefix(b"text")) for line in reply.body.splitlines()] == [
        {"type": "text", "more": "HEL"},
        {"type": "text", "more": "LO"},
        {"tokens": 2},
    ]
    reply = _ask(monkeypatch, {"text": "hi", "stream": False}, path=path)
    assert (reply.status, reply.json["at"]) == (400, "stream")
