"""Fields and keys of other APIs: refused with what this server has in their place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cases import each_case
from tests.unit.api.fake_engine import Reply, Site

CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
FUNCTION = {"name": "f"}


def answered(path: str, body: Any) -> Reply:
    async def exchange() -> Reply:
        return await Site().post(path, body)

    return asyncio.run(exchange())


@each_case(
    ("path", "fields", "said"),
    [
        (CHAT, {"think": True}, 'write it as reasoning_effort: "none" switches reasoning off'),
        (CHAT, {"speculative.type": "a"}, 'write it as speculation: "off", "auto" or {"max_draft'),
        (CHAT, {"functions": [FUNCTION]}, "given as tools; write each as an entry of tools: {"),
        (CHAT, {"function_call": FUNCTION}, "write it as tool_choice: {"),
        (CHAT, {"structured_outputs": {"json": "{bad"}},
         "structured_outputs.json is a text that is not JSON (Expecting property name"),
        (CHAT, {"guided_json": "{bad"},
         "guided_json (read as structured_outputs.json) is a text that is not JSON (Expecting"),
        (CHAT, {"reasoning_effort": "huge"}, 'reasoning_effort is "huge"; none, minimal, low, '),
        (CHAT, {"reasoning_effort": ["low"]}, 'reasoning_effort is ["low"]; none, minimal, low'),
        (CHAT, {"verbosity": "loud"}, 'verbosity is "loud"; low, medium, high are allowed'),
        (CHAT, {"verbosity": 3}, "verbosity is 3; low, medium, high are allowed"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": "a", "content": "1"}]},
         "messages[0] is the result of a tool, and no earlier message"),
        (COUNT, {"temperature": 1}, "which counts the tokens of a prompt; it belongs to POST /v1/"),
        (COUNT, {"stop_sequences": ["a"]}, "and changes no prompt: leave it out"),
    ],
)  # fmt: skip
def test_a_field_of_another_api_leads_to_the_one_here(
    path: str, fields: dict[str, Any], said: str
) -> None:
    reply = answered(path, {**MESSAGES, **fields})
    assert reply.status == 400
    message = reply.json["error"]["message"]
    assert said in message
    assert "Error:" not in message  # no name of a Python class


@pytest.mark.parametrize("name", ["low", "high"])
def test_hints_of_their_values_are_accepted(name: str) -> None:
    assert answered(CHAT, {**MESSAGES, "verbosity": name, "reasoning_effort": name}).status == 200


@pytest.mark.parametrize(
    ("headers", "query", "said"),
    [
        ({"x-api-key": "sk-1"}, b"", "no API key was sent; x-api-key is not read here; send `"),
        ({"api-key": "sk-1"}, b"", "; api-key is not read here; send `Authorization: Bearer"),
        ({}, b"api_key=sk-1", "The address has api_key=..., which is not read, because addresses"),
        ({}, b"a=1&key=sk-1", "The address has key=..., which is not read"),
        ({}, b"", "no API key was sent; send `Authorization: Bearer KEY`"),
    ],
)
def test_a_key_in_another_place_is_said_to_be_there(
    headers: dict[str, str], query: bytes, said: str
) -> None:
    async def exchange() -> Reply:
        site = Site(api_key=("sk-1",))
        return await site.call("GET", "/tokenizer_info", b"", headers=headers, query=query)

    reply = asyncio.run(exchange())
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert said in reply.error["message"]
    assert "sk-1" not in reply.error["message"]
