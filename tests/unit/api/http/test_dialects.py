"""A second HTTP dialect over the neutral code: its own path, errors, events and key header."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from quire.api.app import build_app, routes_of
from quire.api.generation.chat_output import ChatOutputParser
from quire.api.generation.choice_streams import Choice, Prompt, PromptState
from quire.api.generation.conversation import ConversationFields, parsing_of, rendered
from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.generation.request_context import encode
from quire.api.generation.tools import offer_of
from quire.api.generation.usage import Usage
from quire.api.http.dialect import Dialect, Headers
from quire.api.http.errors import ErrorReport
from quire.api.http.middleware import RequestMiddleware
from quire.api.openai.dialect import OPENAI
from quire.api.openapi.operations import OPERATIONS
from quire.base.errors import InvalidParameter, NotAuthorized, WorkerError
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta
from quire.text.chat_template import ChatTemplate
from quire.text.messages import checked_messages
from tests.unit.api import fake_engine
from tests.unit.api.fake_engine import Site
from tests.unit.api.said import Reply

PATH = "/lines/say"


class LineFraming:
    """One line of JSON for each event: its kind, if it has one, and its payload; no ids."""

    media_type = "application/x-ndjson"
    heartbeat = b"\n"

    def event(self, number: int, payload: bytes, kind: str) -> bytes:
        return kind.encode() + payload + b"\n"

    def error(self, number: int, data: bytes) -> bytes:
        return b"! " + data + b"\n"

    def end(self, number: int) -> bytes:
        return b""


class LineDialect:
    challenge = None
    id_header = "x-request-id"

    def read_key(self, headers: Headers) -> bytes:
        for name, value in headers:
            if name == b"x-line-key":
                return value
        raise NotAuthorized("send the key as x-line-key")

    def error(self, report: ErrorReport, request_id: str) -> tuple[int, Any]:
        status = 529 if report.code == "shutting_down" else report.status
        fault = {"fault": report.code, "reason": report.message, "at": report.param}
        return status, {**fault, "request": request_id}

    def framing(self, request_id: str) -> LineFraming:
        return LineFraming()


class LineWriter:
    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        return {"said": choices[0][0].text, "tokens": usage.completion_tokens}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        yield {"type": "text", "more": delta.text}

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any]:
        return {"type": "text", "more": text}

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        return {"progress": progress.processed}

    def so_far(self, usage: Usage) -> dict[str, Any]:
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        return {"tokens": usage.completion_tokens}


class TalkWriter(LineWriter):
    """Writes the parts of a parsed answer, each under its kind, and calls with their ids."""

    def __init__(self, parser: ChatOutputParser) -> None:
        self._parser = parser.choice(0)

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        ends = delta.finish_reason is not None
        for piece in self._parser.pieces(delta.text, delta.token_chars, ends=ends):
            call = {"id": self._parser.call_id(piece.call)} if piece.kind == "call" else {}
            yield {"type": piece.kind, "more": piece.text, **call}

    def of_text(self, prompt: int, index: int, text: str) -> None:
        return None


async def _read_talk(asked: GenerationRequest) -> GenerationJob:
    """Read a conversation of a form of its own: a list of [role, text]."""
    messages = [{"role": role, "content": text} for role, text in asked.given["talk"]]
    fields = ConversationFields(messages=checked_messages(messages))
    conversation = await rendered(asked.context, fields)
    sampling, parser = parsing_of(
        asked.context,
        offer_of({"tools": [TOOL]}),
        replace(conversation, shows_tools=True),
        SamplingParams(seed=1),
        includes_reasoning=True,
    )
    assert parser is not None
    token_ids = await encode(
        asked.context, conversation.text, add_special_tokens=False, param="talk"
    )
    sampling = asked.limited(sampling, len(token_ids), default_tokens=None)
    rules = parser.text_rules(asked.engine.tokenizer)
    prompt = Prompt(token_ids=token_ids, sampling=sampling, text_rules=rules)
    return GenerationJob(prompts=[prompt], writer=TalkWriter(parser))


TALK_TEMPLATE = {"default": "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def _read(asked: GenerationRequest) -> GenerationJob:
    if "talk" in asked.given:
        return await _read_talk(asked)
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
        honoured=frozenset({"text", "talk", "stream"}),
        id_prefix="line-",
        read=_read,
        dialect=dialect,
    )

    async def say(request: Request) -> Response:
        return await generate(site.server_state, request, route)

    routes = [Route(PATH, say, methods=["POST"]), *routes_of(site.server_state)]
    router = Router(routes, redirect_slashes=False)
    site.app = RequestMiddleware(router, site.server_state, OPENAI, dialects={"/lines": dialect})
    return site


def _ask(
    monkeypatch: pytest.MonkeyPatch,
    body: Any,
    headers: dict[str, str] | None = None,
    path: str = PATH,
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
        return await site.post(path, body, headers=headers)

    return asyncio.run(ask())


def _generation_route(route: Route) -> GenerationRoute | None:
    """Return what the object that serves a route passes to `generate`."""
    owner = getattr(route.endpoint, "__self__", None)
    held = [] if owner is None else vars(owner).values()
    return next((value for value in held if isinstance(value, GenerationRoute)), None)


def test_each_generation_route_has_the_dialect_of_its_path() -> None:
    async def dialects() -> dict[str, tuple[Dialect, Dialect]]:
        server_state = Site().server_state
        app = build_app(server_state)
        assert isinstance(app, RequestMiddleware)
        pairs = {route.path: _generation_route(route) for route in routes_of(server_state)}
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
