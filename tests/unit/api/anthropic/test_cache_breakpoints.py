"""Breakpoints of the prompt cache: where marked prefixes end, how many, in which order, usage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.api.anthropic import cache_breakpoints
from quire.api.anthropic import request as request_fields
from quire.base.cache_usage import CacheUsage
from quire.text.chat_template import ChatTemplate
from tests.unit.api.anthropic.test_messages import (
    ASKED,
    COUNT,
    TOOL,
    ask,
    engine,
    events_of,
    refusal,
)
from tests.unit.api.fake_engine import Site

HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
H_MS, M_MS = 3_600_000.0, 300_000.0
# Tools behind the system message, as in some templates.
TOOLS_LAST = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};"
    "{% if loop.first %}{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}{% endif %}"
    "{% endfor %}"
)


def text(words: str, control: Any = None) -> dict[str, Any]:
    return {
        "type": "text",
        "text": words,
        **({} if control is None else {"cache_control": control}),
    }


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def pins_of(template: str | None = None, **fields: Any) -> list[tuple[str, float]]:
    """Return the text of each prefix that a request pins, and for how long."""
    made = engine()
    if template is not None:
        made.template = ChatTemplate({"default": template}, variables={})
    reply = ask({**ASKED, **fields}, on=made)
    assert reply.status == 200, reply.body
    (asked,) = made.asked
    return [
        (bytes(asked.prompt_ids[: pin.num_tokens]).decode(), pin.lifetime_ms)
        for pin in asked.terms.cache_pins
    ]


def test_a_request_without_breakpoints_pins_nothing() -> None:
    assert pins_of(system=[text("Be brief.")]) == []


@pytest.mark.parametrize(("num_chars", "is_large"), [(10, False), (140_000, True)])
def test_a_large_body_is_converted_beside_the_event_loop(
    num_chars: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its size, however many messages it has."""
    threads: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return call

    for module, name in (
        (request_fields, "history_of"),
        (request_fields, "breakpoints_of"),
        (cache_breakpoints, "beginning_of"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    tool = {**TOOL, "description": "d" * num_chars}
    messages = [said("user", text("one", MINUTES), text("two"))]
    ask({**ASKED, "tools": [tool], "messages": messages})
    assert len(threads) >= 2
    assert {name.startswith("quire-slow") for name in threads} == {is_large}


def test_each_prefix_ends_behind_its_block() -> None:
    tool = {**TOOL, "cache_control": HOUR}
    system = [text("Be brief."), text("And kind.", HOUR)]
    messages = [
        said("user", text("one", MINUTES), text("two")),
        said("assistant", text("three")),
        said("user", text("four", MINUTES)),
    ]
    pins = pins_of(tools=[tool], system=system, messages=messages)
    assert [lifetime_ms for _, lifetime_ms in pins] == [H_MS, H_MS, M_MS, M_MS]
    prefixes = [prefix for prefix, _ in pins]
    assert all(
        one < other for one, other in zip(map(len, prefixes), map(len, prefixes[1:]), strict=False)
    )
    assert "weather" in prefixes[0]
    assert ("And kind." in prefixes[1], "one" in prefixes[1]) == (True, False)
    assert ("one" in prefixes[2], "two" in prefixes[2]) == (True, False)
    assert prefixes[3].endswith("user:four;")


def test_tools_behind_the_system_are_in_one_prefix_with_it() -> None:
    tool = {**TOOL, "cache_control": MINUTES}
    ((prefix, _),) = pins_of(TOOLS_LAST, tools=[tool], system="Be brief.")
    assert prefix.startswith("system:Be brief.;[")
    assert "weather" in prefix
    assert "user" not in prefix.partition("]")[2].replace("user:", "")


def test_the_request_itself_may_be_marked() -> None:
    ((prefix, lifetime_ms),) = pins_of(cache_control=HOUR)
    assert prefix.endswith("hi;")
    assert lifetime_ms == H_MS


def test_results_of_tools_and_their_texts_may_be_marked() -> None:
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    for place in ("result", "text"):
        inner = text("cold", MINUTES if place == "text" else None)
        result = {"type": "tool_result", "tool_use_id": "t", "content": [inner]}
        if place == "result":
            result["cache_control"] = MINUTES
        messages = [
            said("user", text("a")),
            said("assistant", call),
            said("user", result, text("b")),
        ]
        ((prefix, _),) = pins_of(tools=[TOOL], messages=messages)
        assert ("cold" in prefix, "user:b" in prefix) == (True, False)


def test_a_prefix_that_the_template_refuses_alone_is_not_pinned() -> None:
    template = (
        "{% if messages[-1].content == 'four' %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content }};"
        "{% endfor %}{% else %}{{ raise_exception('no') }}{% endif %}"
    )
    messages = [
        said("user", text("one", MINUTES)),
        said("assistant", text("x")),
        said("user", text("four")),
    ]
    assert pins_of(template, messages=messages) == []
    messages[0]["content"][0].pop("cache_control")
    messages[2]["content"][0]["cache_control"] = MINUTES
    assert len(pins_of(template, messages=messages)) == 1


def test_breakpoints_do_not_change_the_prompt() -> None:
    asked = []
    for control in (None, MINUTES):
        made = engine()
        ask({**ASKED, "system": [text("Be brief.", control)]}, on=made)
        asked.append(made.asked[0].prompt_ids)
    assert asked[0] == asked[1]


def test_there_are_at_most_four() -> None:
    system = [text(str(at), MINUTES) for at in range(5)]
    for path in ("/v1/messages", COUNT):
        body = {"messages": ASKED["messages"], "system": system}
        status, kind, message = refusal({**(ASKED if path != COUNT else {}), **body}, path=path)
        assert (status, kind) == (400, "invalid_request_error")
        assert "at most 4" in message
    four = {**ASKED, "system": system[:4]}
    assert ask(four).status == 200
    assert refusal({**four, "cache_control": MINUTES})[0] == 400


def test_a_longer_lifetime_comes_first() -> None:
    system = [text("a", MINUTES), text("b", HOUR)]
    status, _, message = refusal({**ASKED, "system": system})
    assert status == 400
    assert "system[1] has cache_control" in message
    assert ask({**ASKED, "system": system[::-1]}).status == 200


@pytest.mark.parametrize("where", ["system", "messages"])
def test_an_empty_text_has_no_breakpoint(where: str) -> None:
    block = text("", MINUTES)
    body = {"system": [block]} if where == "system" else {"messages": [said("user", block)]}
    assert "empty text" in refusal({**ASKED, **body})[2]


def test_usage_counts_each_token_once() -> None:
    made = engine()
    made.cache_use = CacheUsage(pool_tokens=2, pinned_tokens=((H_MS, 16), (M_MS, 8)))

    async def exchange() -> tuple[Any, Any]:
        site = Site(made)
        asked = {**ASKED, "system": "Be brief, and kind to all."}
        whole = await site.post("/v1/messages", {**asked, "cache_control": MINUTES})
        stream = await site.post("/v1/messages", {**asked, "stream": True})
        return whole, stream

    whole, stream = asyncio.run(exchange())
    usage = whole.json["usage"]
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": 8,
        "ephemeral_1h_input_tokens": 16,
    }
    assert usage["cache_creation_input_tokens"] == 24
    prompt = len(made.asked[0].prompt_ids)
    assert usage["input_tokens"] == prompt - 24 - 2
    events = dict(events_of(stream))
    for found in (events["message_start"]["message"]["usage"], events["message_delta"]["usage"]):
        counts = {"output_tokens": 0, "output_tokens_details": None}
        assert {**found, **counts} == {**usage, **counts}
