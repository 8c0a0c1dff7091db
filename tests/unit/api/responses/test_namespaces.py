"""Tools of the type `namespace` in POST /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import each_case
from tests.unit.api.responses.asking import ASKED, TOOL, ask, engine, events_of, of_chat
from tests.unit.api.shown_conversation import CALL, CHAT_TOOL

NAMESPACE = {"type": "namespace", "name": "mcp__sky", "description": "Of MCP.", "tools": [TOOL]}
FULL_NAME = "mcp__sky__weather"


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_with_both_names(stream: bool) -> None:
    made = engine(CALL.replace("weather", FULL_NAME))
    other = {**TOOL, "name": "other"}
    reply = ask({**ASKED, "tools": [NAMESPACE, other], "stream": stream}, on=made)
    response = events_of(reply)[-1]["response"] if stream else reply.json
    assert response["tools"] == [
        {**NAMESPACE, "tools": [{**TOOL, "strict": False}]},
        {**other, "strict": False},
    ]
    (call,) = response["output"]
    assert (call["namespace"], call["name"]) == ("mcp__sky", "weather")
    assert json.loads(call["arguments"]) == {"city": "Ulm"}
    # To the model it is one function, with a longer name.
    offered = {**CHAT_TOOL["function"], "name": FULL_NAME}
    offered["description"] = "Of MCP.\nTell the weather."
    tools = [
        {"type": "function", "function": offered},
        {"type": "function", "function": {**CHAT_TOOL["function"], "name": "other"}},
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 8}
    assert made.asked[0].prompt_ids == of_chat(chat).prompt_ids
    again = [{"role": "user", "content": "hi"}, call]
    for names in ({}, {"name": "weather", "namespace": "mcp__sky"}):
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a"}
        asked = {**ASKED, "tools": [NAMESPACE], "input": [*again, {**output, **names}]}
        assert ask(asked, on=made).status == 200
        prompt = bytes(made.asked[-1].prompt_ids).decode()
        assert f"{call['call_id']} {FULL_NAME} " in prompt
        assert "weather;" not in prompt


def test_a_namespace_may_have_null_as_its_description() -> None:
    reply = ask({**ASKED, "tools": [{**NAMESPACE, "description": None}]})
    assert reply.status == 200, reply.body
    assert reply.json["tools"][0]["description"] is None


@pytest.mark.parametrize("many", [False, True])
def test_a_choice_may_name_a_function_by_both_names(many: bool) -> None:
    named = {"type": "function", "namespace": "mcp__sky", "name": "weather"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]} if many else named
    made = engine(CALL.replace("weather", FULL_NAME))
    # A function of the request has the same short name.
    reply = ask({**ASKED, "tools": [TOOL, NAMESPACE], "tool_choice": choice}, on=made)
    assert reply.status == 200, reply.body
    assert reply.json["tool_choice"] == choice
    grammar = made.asked[0].sampling.structured_outputs
    assert FULL_NAME in grammar.text
    assert '"weather"' not in grammar.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a namespace without tools": (
        {"tools": [{"type": "namespace", "name": "a"}]},
        'tools[0] is {"type": "namespace", "name": "a"}; {"type": "namespace"',
    ),
    "a namespace with another key": ({"tools": [{**NAMESPACE, "x": 1}]}, "tools[0] is {"),
    "a hosted tool in a namespace": (
        {"tools": [{**NAMESPACE, "tools": [{"type": "web_search"}]}]},
        'tools[0].tools[0].type is "web_search"',
    ),
    "a function of a namespace twice": (
        {"tools": [{**NAMESPACE, "tools": [TOOL, TOOL]}]},
        FULL_NAME,
    ),
}


@each_case("case", REFUSED)
def test_what_a_namespace_does_not_take_is_refused(case: str) -> None:
    sent, words = REFUSED[case]
    reply = ask({**ASKED, **sent})
    assert reply.status == 400
    assert words in reply.json["error"]["message"]
