"""Requests of the Responses API to a scripted engine, and what the engine was asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from quire.base.records import FinishReason
from quire.text.chat_template import ChatTemplate
from tests.unit.api.fake_engine import CARD, FakeEngine, Reply, Site
from tests.unit.api.shown_conversation import CHAT_TOOL, TEMPLATE

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
ASKED: dict[str, Any] = {"input": "hi", "seed": 7, "max_output_tokens": 8}
TOOL: dict[str, Any] = {"type": "function", **CHAT_TOOL["function"]}


def engine(*script: str, reason: FinishReason = FinishReason.STOP, context: int = 2048) -> Any:
    """Return an engine that answers with this script."""
    made = FakeEngine(*script, card=replace(CARD, max_model_len=context))
    made.template = ChatTemplate({"default": TEMPLATE}, variables={})
    made.last_reason = reason
    return made


def ask(body: Any, *, path: str = PATH, on: Any = None, **settings: Any) -> Reply:
    """Return the reply of a new server to one request."""

    async def exchange() -> Reply:
        return await Site(on or engine(), **settings).post(path, body)

    return asyncio.run(exchange())


def of_chat(sent: dict[str, Any]) -> Any:
    """Return what the engine was asked by a chat."""
    made = engine()
    reply = ask(sent, path=CHAT, on=made)
    assert reply.status == 200, reply.body
    return made.asked[0]


def of_response(sent: dict[str, Any]) -> Any:
    """Return what the engine was asked by a request for a response."""
    made = engine()
    reply = ask({**ASKED, **sent}, on=made)
    assert reply.status == 200, reply.body
    return made.asked[0]


def events_of(reply: Reply) -> list[Any]:
    """Return the data of each event; check names and numbers."""
    found = []
    for event in reply.body.decode().split("\n\n"):
        if event:
            name, line = event.split("\n")
            found.append(json.loads(line.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    numbers = [event["sequence_number"] for event in found]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    return found


def kinds_of(events: list[Any]) -> list[str]:
    """Return the types of events, without `response.`."""
    return [event["type"].removeprefix("response.") for event in events]


def without_ids(items: list[Any]) -> list[Any]:
    """Return output items without their ids, which begin with those of their response."""
    hidden = ("id", "call_id")
    return [{key: item[key] for key in item if key not in hidden} for item in items]
