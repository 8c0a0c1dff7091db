"""A small HTTP API that is complete: dialect, routes and writer, and the router's record.

It has what no served API has: the model in its paths, parameters in the query, and a route that
always streams. Errors are {"fault", "reason", "at", "request"}, keys are sent as `x-line-key`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from quire.api.http.dialect import Headers
from quire.api.http.errors import ErrorReport
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter, NotAuthorized
from quire.base.http_apis import API_PATHS, KEY_HEADERS
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta
from quire.router import routes
from quire.router.api_forms import FORMS, ApiForm
from quire.text.messages import checked_messages

API, TOP = "lines", "/lines"
SAY, RECITE = f"{TOP}/{{model}}:say", f"{TOP}/{{model}}:recite"


class LineFraming:
    """One line of JSON for each event: its kind, if it has one, and its payload; no ids."""

    media_type, event_end = "application/x-ndjson", b"\n"
    heartbeat = b"\n"

    def event(self, number: int, payload: bytes, kind: str) -> bytes:
        return kind.encode() + payload + b"\n"

    def error(self, number: int, data: bytes) -> bytes:
        return b"! " + data + b"\n"

    def end(self, number: int) -> bytes:
        return b""


class LineDialect:
    challenge = None
    id_header = "x-line-id"

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
    """shouts: writes capital letters."""

    def __init__(self, *, shouts: bool = False) -> None:
        self._shouts = shouts

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        return {"said": self._said(choices[0][0].text), "tokens": usage.completion_tokens}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        yield {"type": "text", "more": self._said(delta.text)}

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any]:
        return {"type": "text", "more": self._said(text)}

    def _said(self, text: str) -> str:
        return text.upper() if self._shouts else text

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        return {"progress": progress.processed}

    def so_far(self, usage: Usage) -> dict[str, Any]:
        return {}

    def of_usage(self, usage: Usage) -> dict[str, Any]:
        return {"tokens": usage.completion_tokens}


class TalkWriter(LineWriter):
    """Writes the parts of a parsed answer, each under its kind, and calls with their ids."""

    def __init__(self, parser: ChatOutputParser) -> None:
        super().__init__()
        self._parser = parser.choice(0)

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        ends = delta.finish_reason is not None
        for piece in self._parser.pieces(delta.text, delta.token_chars, ends=ends):
            call = {"id": self._parser.call_id(piece.call)} if piece.kind == "call" else {}
            yield {"type": piece.kind, "more": piece.text, **call}

    def of_text(self, prompt: int, index: int, text: str) -> None:
        return None


async def _read_talk(request: GenerationRequest) -> GenerationJob:
    """Read a conversation of a form of its own: a list of [role, text]."""
    messages = [{"role": role, "content": text} for role, text in request.given["talk"]]
    fields = ConversationFields(messages=checked_messages(messages))
    conversation = await rendered(request.context, fields)
    sampling, parser = parsing_of(
        request.context,
        offer_of({"tools": [TOOL]}),
        replace(conversation, shows_tools=True),
        SamplingParams(seed=1),
        includes_reasoning=True,
    )
    assert parser is not None
    token_ids = await encode(
        request.context, conversation.text, add_special_tokens=False, param="talk"
    )
    sampling = request.limited(sampling, len(token_ids), default_tokens=None)
    rules = parser.text_rules(request.engine.tokenizer)
    prompt = Prompt(token_ids=token_ids, sampling=sampling, text_rules=rules)
    return GenerationJob(prompts=[prompt], writer=TalkWriter(parser))


TALK_TEMPLATE = {"default": "<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def _read(request: GenerationRequest) -> GenerationJob:
    if "talk" in request.given:
        return await _read_talk(request)
    text = request.given.get("text")
    if not isinstance(text, str):
        raise InvalidParameter("text is missing; give a text", param="text")
    token_ids = await encode(request.context, text, add_special_tokens=False, param="text")
    sampling = SamplingParams(max_tokens=8, seed=1)
    writer = LineWriter(shouts=request.context.query.get("shout") == "true")
    return GenerationJob(prompts=[Prompt(token_ids=token_ids, sampling=sampling)], writer=writer)


DIALECT = LineDialect()
_SAY = GenerationRoute(
    honoured=frozenset({"text", "talk", "stream"}),
    id_prefix="line-",
    read=_read,
    dialect=DIALECT,
    query_params=frozenset({"shout"}),
    path_model="model",
)
_RECITE = replace(_SAY, honoured=_SAY.honoured - {"stream"}, always_streams=True)


def line_routes(server_state: ServerState) -> list[Route]:
    """Return the routes of a server."""

    async def say(request: Request) -> Response:
        return await generate(server_state, request, _SAY)

    async def recite(request: Request) -> Response:
        return await generate(server_state, request, _RECITE)

    return [Route(SAY, say, methods=["POST"]), Route(RECITE, recite, methods=["POST"])]


def route_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add this API to the table of APIs and to the router, for one test."""
    form = ApiForm(
        api=API,
        error=lambda refusal, status: {"fault": refusal.code, "reason": str(refusal)},
        event=lambda refusal, raw: b"! " + raw + b"\n",
        overloaded=529,
        prompts=("text", "talk"),
        limits=(("limits", "tokens"),),
        usage=("prompt", "tokens"),
    )
    monkeypatch.setitem(API_PATHS, TOP, API)
    monkeypatch.setitem(KEY_HEADERS, API, (b"x-line-key",))
    monkeypatch.setitem(FORMS, API, form)
    route = routes.Route()
    monkeypatch.setitem(routes.ROUTES, SAY, route)
    monkeypatch.setitem(routes.ROUTES, RECITE, replace(route, streams=True))
