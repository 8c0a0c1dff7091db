"""Tools and reasoning through the chat route: requests and answers, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from quire.api.generation.tools import offer_of
from quire.base.errors import InvalidParameter
from quire.base.records import FinishReason
from quire.config import server_config
from quire.output_parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "hi"}]
HERMES = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
OPENED = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
EFFORT = HERMES + "{{ reasoning_effort }}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def engine(*script: str, template: str = HERMES, reason: FinishReason = FinishReason.STOP) -> Any:
    made = FakeEngine(*script, card=replace(CARD, max_model_len=512))
    made.template = ChatTemplate({"default": template}, variables={})
    made.last_reason = reason
    return made


def chat(answering: FakeEngine | None = None, settings: Any = None, **body: Any) -> Reply:
    async def exchange() -> Reply:
        site = Site(answering or engine("Hello."), **(settings or {}))
        return await site.post(CHAT, {"messages": SAID, **body})

    return asyncio.run(exchange())


def whole(reply: Reply, index: int = 0) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    choice: dict[str, Any] = reply.json["choices"][index]
    return choice


def streamed(reply: Reply, index: int = 0) -> dict[str, Any]:
    """Return a choice joined from its chunks, as clients do."""
    assert reply.status == 200, reply.body
    assert reply.events[-1] == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert finish_reason is None
            finish_reason = choice["finish_reason"]
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for part in delta.get("tool_calls", []):
                if part["index"] == len(message["tool_calls"]):
                    assert part["type"] == "function"
                    message["tool_calls"].append(
                        {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                    )
                else:
                    assert "id" not in part
                message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return {"message": message, "finish_reason": finish_reason}


def calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call.get("function", call)["name"], call.get("function", call)["arguments"])
        for call in message.get("tool_calls", [])
    ]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("pieces", [1, 3, len(CALL)])
def test_a_call_is_parsed_from_the_answer_streamed_or_whole(pieces: int) -> None:
    size = -(-len(CALL) // pieces)
    script = [CALL[at : at + size] for at in range(0, len(CALL), size)]
    choice = whole(chat(engine(*script), tools=[tool()]))
    assert calls(choice["message"]) == [("weather", '{"city": "Oslo"}')]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["type"] == "function"
    stream = streamed(chat(engine(*script), tools=[tool()], stream=True))
    assert calls(stream["message"]) == calls(choice["message"])
    assert stream["message"]["content"] == ""
    assert stream["finish_reason"] == "tool_calls"


def test_every_call_of_every_choice_has_its_own_id() -> None:
    reply = chat(engine(CALL, CALL), tools=[tool()], n=2)
    ids = [
        call["id"] for choice in reply.json["choices"] for call in choice["message"]["tool_calls"]
    ]
    assert len(ids) == len(set(ids)) == 4
    assert all(id_.startswith("call_") for id_ in ids)
    nine = engine('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', template=HERMES + "[TOOL_CALLS]")
    nine.template = ChatTemplate({"default": "{{ tools }}[TOOL_CALLS]"}, variables={})
    (call,) = whole(chat(nine, tools=[tool()]))["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


@pytest.mark.parametrize(
    ("text", "reason", "finish", "arguments"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"ci', "length", "length", '{"ci'),
        ('<tool_call>{"name": "weather", "arguments": {"ci', "stop", "stop", '{"ci'),
        (CALL, "length", "length", '{"city": "Oslo"}'),
        ('<tool_call>{"name": "weather", "arguments": {city}}</tool_call>', "stop", "tool_calls",
         "{city}"),
    ],
)  # fmt: skip
def test_invalid_arguments_pass_unchanged_and_the_finish_reason_shows_completeness(
    text: str, reason: str, finish: str, arguments: str
) -> None:
    for stream in (False, True):
        answering = engine(*text, reason=FinishReason(reason))
        reply = chat(answering, tools=[tool()], stream=stream)
        choice = streamed(reply) if stream else whole(reply)
        assert calls(choice["message"]) == [("weather", arguments)]
        assert choice["finish_reason"] == finish


def test_reasoning_has_its_own_fields_and_is_counted() -> None:
    script = ["<think>", "so ", "so", "</think>", "\n\n", "Yes", "."]
    reply = chat(engine(*script))
    message = whole(reply)["message"]
    assert message["reasoning_content"] == message["reasoning"] == "so so"
    assert message["content"] == "Yes."
    details = reply.json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 4}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    reply = chat(engine(*script), **options)
    assert streamed(reply)["message"] == {
        "content": "Yes.",
        "reasoning_content": "so so",
        "tool_calls": [],
    }
    assert reply.events[-2]["usage"]["completion_tokens_details"] == details
    for stream in (False, True):
        reply = chat(engine(*script), include_reasoning=False, stream=stream)
        choice = streamed(reply) if stream else whole(reply)
        assert choice["message"]["content"] == "Yes."
        assert not choice["message"].get("reasoning_content")


def test_reasoning_opened_by_the_template_needs_no_mark_in_the_answer() -> None:
    for script, reasoning, content in (
        (["so", "</think>", "Yes"], "so", "Yes"),
        (["so so"], "so so", ""),
    ):
        message = whole(chat(engine(*script, template=OPENED)))["message"]
        assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)


def test_marks_that_are_special_tokens_are_seen_by_the_parser_only() -> None:
    answering = engine(CALL)
    answering.tokenizer = ByteTokenizer(marks=("<tool_call>", "</think>", "<other>"))
    chat(answering, tools=[tool()])
    assert answering.asked[0].text_rules.shown_ids == {200, 201}
    chat(answering)
    assert answering.asked[1].text_rules.shown_ids == {200, 201}
    plain = engine("a", template="{{ messages }}")
    plain.tokenizer = ByteTokenizer(marks=("<tool_call>",))
    chat(plain)
    assert plain.asked[0].text_rules.shown_ids == frozenset()


def test_without_tools_or_with_tool_choice_none_text_stays_text() -> None:
    for more in ({}, {"tools": []}, {"tools": [tool()], "tool_choice": "none"}):
        answering = engine(CALL)
        choice = whole(chat(answering, **more))
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
        assert b"[weather]" not in bytes(answering.asked[0].prompt_ids)


def test_an_operator_selects_another_parser_or_none() -> None:
    text = '{"name": "weather", "arguments": {}}'
    parsers = {"json": [("weather", "{}")], "none": [], "hermes": []}
    for name, expected in parsers.items():
        choice = whole(chat(engine(text), {"tool_call_parser": name}, tools=[tool()]))
        assert calls(choice["message"]) == expected
    message = whole(chat(engine("<think>a</think>b"), {"reasoning_parser": "none"}))["message"]
    assert message["content"] == "<think>a</think>b"
    assert server_config.TOOL_PARSERS == TOOL_PARSERS
    assert server_config.REASONING_PARSERS == REASONING_PARSERS


def test_logprobs_of_tokens_without_text_yet_are_returned() -> None:
    script = list(CALL)
    reply = chat(engine(*script), tools=[tool()], logprobs=True, stream=True)
    texts = [
        token["token"]
        for event in reply.events[:-1]
        for choice in event["choices"]
        for token in (choice["logprobs"] or {}).get("content", [])
    ]
    assert texts == script
    choice = whole(chat(engine(*script), tools=[tool()], logprobs=True))
    assert [token["token"] for token in choice["logprobs"]["content"]] == script


def test_a_conversation_with_calls_and_results_is_rendered() -> None:
    answering = engine("Cold.")
    messages = [
        *SAID,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "-3"},
    ]
    assert (
        whole(chat(answering, messages=messages, tools=[tool()]))["message"]["content"] == "Cold."
    )
    prompt = bytes(answering.asked[0].prompt_ids).decode()
    assert '<tool_call>weather {"city": "Oslo"}</tool_call>' in prompt
    assert "tool:-3;" in prompt


def test_reasoning_effort_is_passed_to_templates_that_use_it() -> None:
    def prompt(template: str, **more: Any) -> str:
        answering = engine("a", template=template)
        assert chat(answering, **more).status == 200
        return bytes(answering.asked[0].prompt_ids).decode()

    assert prompt(EFFORT, reasoning_effort="high").endswith("high")
    assert prompt(HERMES, reasoning_effort="none").endswith("<think></think>")
    assert prompt("{{ messages }}", reasoning_effort="none") == prompt("{{ messages }}")
    assert prompt(HERMES, chat_template_kwargs={"enable_thinking": False}).endswith("</think>")


@pytest.mark.parametrize(
    ("template", "body", "listed"),
    [
        ("{{ messages }}", {"reasoning_effort": "low"}, "reasoning_effort"),

        (HERMES, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
         "reasoning_effort"),
        (HERMES, {"verbosity": "low"}, "verbosity"),
        (HERMES, {"chat_template_kwargs": {"thinking_budget": 5}},
         "chat_template_kwargs.thinking_budget"),
        (HERMES, {"reasoning_effort": "low"}, None),
        (HERMES, {"enable_thinking": False}, None),
        (EFFORT, {"reasoning_effort": "low", "verbosity": "medium"}, None),
    ],
)  # fmt: skip
def test_unfollowed_hints_cause_no_error_and_are_listed(
    template: str, body: dict[str, Any], listed: str | None
) -> None:
    reply = chat(engine("a", template=template), **body)
    assert reply.status == 200, reply.body
    assert reply.headers.get("x-quire-ignored-fields") == listed


@each_case(
    ("body", "param", "words"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [1]}, "tools", "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "custom"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools", "'a b'"),
        ({"tools": [tool("a" * 129)]}, "tools", "128"),
        ({"tools": [tool(), tool()]}, "tools", "two functions"),
        ({"tools": [tool(parameters=[])]}, "tools", "parameters"),
        ({"tools": [tool(strict="yes")]}, "tools", "strict"),
        ({"tools": [tool(f"f{at}") for at in range(257)]}, "tools", "256"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", "'any'"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [tool()]},
         "tool_choice", "'b'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}},
          "tools": [tool()]}, "tool_choice", "allowed_tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"functions": [{"name": "a"}]}, "functions", "tools"),
        ({"function_call": {"name": "a"}}, "function_call", "tool_choice"),
        ({"include_reasoning": "no"}, "include_reasoning", "true or false"),
        ({"reasoning_effort": 3}, "reasoning_effort", "none, minimal, low"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages",
         "custom"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages",
         "tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "a", "arguments": [1]}}]}]}, "messages", "arguments"),
    ],
)  # fmt: skip
def test_invalid_tools_are_rejected_by_name(body: dict[str, Any], param: str, words: str) -> None:
    reply = chat(**body)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert words in reply.error["message"].replace('"', "'")


def test_a_template_without_tools_rejects_them() -> None:
    answering = engine(json.dumps({"name": "weather", "arguments": {}}), template="{{ messages }}")
    reply = chat(answering, tools=[tool()])
    assert reply.status == 400
    assert reply.error["param"] == "tools"
    reply = chat(answering, {"unknown_fields": "warn"}, tools=[tool()])
    assert reply.headers["x-quire-ignored-fields"] == "tools"
    assert "tool_calls" not in whole(reply)["message"]


@pytest.mark.parametrize("given", [{}, {"parameters": None}])
def test_a_function_without_parameters_takes_none(given: dict[str, Any]) -> None:
    bare = {"type": "function", "function": {"name": "now", **given}}
    schemas = offer_of({"tools": [bare, tool()]}).schemas
    assert schemas["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert schemas["weather"] == SCHEMA
    answering = engine('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert whole(chat(answering, tools=[bare], tool_choice="required"))["message"]["tool_calls"]
    held = answering.asked[0].sampling.structured_outputs
    assert '"additionalProperties":false' in held.text.replace(" ", "").replace("\\", "")


def with_schema(parameters: Any, **more: Any) -> dict[str, Any]:
    return tool(parameters=parameters, **more)


FORM = '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
TYPES = "array, boolean, integer, null, number, object and string are allowed"
# (a tool, words of the error): no part of a tool is ignored silently.
REFUSED_TOOLS: list[tuple[Any, str]] = [
    (with_schema({"type": "objekt"}), f'(at #/type); did you mean "object"? {TYPES}'),
    (
        with_schema({"type": "objekt"}, strict=True),
        'function.parameters: the schema has the type "',
    ),
    (with_schema({"type": "string"}), 'the type "string" (at #/type); arguments are an object: '),
    (with_schema({"type": ["string", "null"]}), "arguments are an object: write"),
    (with_schema({"type": None}), f"the type null (at #/type); {TYPES}"),
    (with_schema([]), "tools[0].function.parameters is []; a JSON schema of an object, such as"),
    (with_schema("text"), 'tools[0].function.parameters is "text"; a JSON schema of an object'),
    (with_schema({"properties": {"a": {"type": "int"}}}), 'the type "int" (at #/properties/a/type'),
    (with_schema({"properties": {"a": "string"}}), '"string" at #/properties/a; a schema is'),
    (with_schema({"type": "object", "required": "a"}), '"a" at #/required; a list of property'),
    (with_schema({"city": {"type": "string"}}), 'has "city" and no keyword of JSON Schema; list'),
    (with_schema(None, input_schema={"type": "object"}), "has input_schema, and no parameters"),
    ({"name": "f", "parameters": {}}, f"under function: write it as {FORM}"),
    ({"type": "function", "name": "f"}, f"under function: write it as {FORM}"),
    ({"name": "f", "input_schema": {}}, f"under function: write it as {FORM}"),
    ({"function": {"name": "f"}}, 'tools[0].type is missing; "function" is allowed: write it as'),
    ({"type": "function"}, f"tools[0].function is missing; write the tool as {FORM}"),
    ({"type": "web_search"}, 'tools[0].type is "web_search"; "function" is allowed'),
    ({"type": "function", "function": {}}, "tools[0].function.name is missing; 1 to 128 letters"),
    ("f", f'tools[0] is "f"; an object {FORM} is allowed'),
]


@each_case(("given", "said"), REFUSED_TOOLS)
def test_a_tool_of_another_form_is_refused_whether_calls_are_enforced_or_not(
    given: Any, said: str
) -> None:
    for choice in ("auto", "required", "none"):
        with pytest.raises(InvalidParameter) as error:
            offer_of({"tools": [given], "tool_choice": choice})
        assert said in str(error.value)
        assert error.value.param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {}}},
        {"anyOf": [{"type": "object"}]},
        {"title": "none"},
        {"type": "object", "required": None},
    ],
)
def test_a_schema_that_allows_objects_is_accepted(schema: dict[str, Any]) -> None:
    assert offer_of({"tools": [with_schema(schema)]}).schemas["weather"] == schema
