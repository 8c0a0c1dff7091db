"""Output constraints: grammars of tools and of response formats, as the engine receives them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from quire.base.grammar import Grammar
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
HERMES = "{{ messages }}{{ tools }}{# <tool_call> #}"
THINKS = HERMES + "{# </think> #}"
OPENED = THINKS + "<think>"
CODER = "{{ messages }}{{ tools }}{# <function= <parameter= #}"
LLAMA = "{{ messages }}{{ tools }}{# <|python_tag|> #}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "required": ["a"]}},
}
PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name"],
        },
    },
}
# An answer in this format may equal a call of "weather" in Llama's format.
EITHER = {
    "type": "json_schema",
    "json_schema": {
        "name": "either",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
        },
    },
}
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Oslo"}}'
BARE = "{{ messages }}{{ tools }}"
BARE_CALL = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def ask(
    template: str = HERMES,
    *,
    script: str | list[str] = "x",
    marks: tuple[str, ...] = (),
    **body: Any,
) -> tuple[Reply, Grammar | None]:
    scripts = [script] if isinstance(script, str) else script
    engine = FakeEngine(*scripts, card=replace(CARD, max_model_len=1024))
    engine.template = ChatTemplate({"default": template}, variables={})
    engine.tokenizer = ByteTokenizer(marks=marks)

    async def exchange() -> Reply:
        settings = body.pop("settings", {})
        messages = [{"role": "user", "content": "hi"}]
        return await Site(engine, **settings).post(
            "/v1/chat/completions", {"messages": messages, **body}
        )

    reply = asyncio.run(exchange())
    held = engine.asked[0].sampling.structured_outputs if engine.asked else None
    return reply, held


def allows(held: Grammar | None, text: str) -> bool:
    assert held is not None
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(held.text))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(name: str = "weather", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_required_call_follows_its_schema() -> None:
    _, held = ask(tools=[tool(), tool("now", parameters=None)], tool_choice="required")
    assert allows(held, call(city="Oslo"))
    assert allows(held, f"{call(city='Oslo')}\n{call('now')}")
    assert not allows(held, call(city=7))
    assert not allows(held, "words")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "name": "now"},
    ],
)
def test_a_named_function_is_called_once_and_no_other(choice: dict[str, Any]) -> None:
    _, held = ask(tools=[tool(), tool("now")], tool_choice=choice)
    assert allows(held, call("now", city="a"))
    assert not allows(held, f"{call('now', city='a')}\n{call('now', city='a')}")
    assert not allows(held, call(city="a"))


def test_allowed_tools_are_all_shown_and_some_callable() -> None:
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        _, held = ask(tools=[tool(), tool("now")], tool_choice=choice)
        assert allows(held, call("now", city="a"))
        assert not allows(held, call(city="a"))
        assert allows(held, "words") == (mode == "auto")


def test_parallel_calls_can_be_forbidden() -> None:
    for choice in ("auto", "required"):
        asked = {"tools": [tool()], "tool_choice": choice, "parallel_tool_calls": False}
        _, held = ask(**asked)
        assert allows(held, call(city="a"))
        assert not allows(held, f"{call(city='a')}\n{call(city='a')}")


def test_strict_functions_follow_their_schemas_and_others_any_object() -> None:
    _, held = ask(tools=[tool(strict=True), tool("now")])
    assert allows(held, "words")
    assert allows(held, call(city="Oslo"))
    assert not allows(held, call(town="Oslo"))
    assert allows(held, call("now", town="Oslo"))
    _, held = ask(tools=[tool(), tool("now")])
    assert held is None


def test_reasoning_may_precede_the_constrained_part() -> None:
    _, held = ask(THINKS, tools=[tool()], tool_choice="required")
    assert allows(held, f"<think>so</think>\n\n{call(city='a')}")
    _, held = ask(OPENED, tools=[tool()], tool_choice="required")
    assert allows(held, f"so</think>{call(city='a')}")
    assert not allows(held, call(city="a"))
    _, held = ask(OPENED, response_format=FORMAT)
    assert allows(held, 'so</think>\n\n{"a": 1}')
    assert not allows(held, '{"a": 1}')
    for form in ({"regex": "[0-9]+/\n?"}, {"choice": ["12/", "x"]}):
        _, held = ask(OPENED, structured_outputs=form)
        assert allows(held, "so</think>12/")
        assert not allows(held, "so</think>y")


def test_a_response_format_combines_with_tools() -> None:
    _, held = ask(tools=[tool()], response_format=FORMAT)
    assert allows(held, '{"a": 1}')
    assert allows(held, call(city="a"))
    assert not allows(held, "words")
    _, held = ask(tools=[tool()], tool_choice="none", response_format=FORMAT)
    assert held is not None
    assert held.kind == "json_schema"


@pytest.mark.parametrize("asked", [FORMAT, PERSON, {"type": "json_object"}])
@pytest.mark.parametrize(("template", "made"), [(LLAMA, LLAMA_CALL), (BARE, BARE_CALL)])
def test_a_response_format_combines_with_json_calls(
    template: str, made: str, asked: dict[str, Any]
) -> None:
    _, held = ask(template, tools=[tool()], response_format=asked)
    fits = {"json_schema": '{"a": 1}', "json_object": '{"a": 1, "name": "weather"}'}
    answer = '{"name": "weather", "age": 3}' if asked is PERSON else fits[asked["type"]]
    assert allows(held, answer)
    assert allows(held, made)
    assert not allows(held, "words")
    assert not allows(held, made.replace('{"city": "Oslo"}', '"Oslo"'))
    _, held = ask(template, tools=[tool()], response_format=asked, tool_choice="none")
    assert held is not None
    assert held.kind == "json_schema"
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        _, held = ask(template, tools=[tool()], response_format=asked, tool_choice=choice)
        assert allows(held, made)
        assert not allows(held, answer)


def test_any_object_combines_with_calls_unless_it_begins_like_one() -> None:
    two = {"tools": [tool(), tool("now")], "response_format": {"type": "json_object"}}
    _, held = ask(LLAMA, **two)
    for text in (
        "{}",
        '{"name": 1, "parameters": 2}',
        '{"name": "now"}',
        '{"name": "no", "parameters": {}}',
        '{"name": "now", "p\\"": {"x": [1, null]}, "parameters": 3}',
        '{"parameters": {}, "name": "now"}',
        '{"é": {"name": "now", "parameters": 5}}',
    ):
        assert allows(held, text), text
    assert allows(held, '{"name": "now", "parameters": {"x": 1}}')
    assert allows(held, f'{LLAMA_CALL}; {{"name": "now", "parameters": {{}}}}')
    for text in (
        '{"name": "now", "parameters": 5}',
        '{"name": "now", "parameters": {}, "x": 1}',
        '{"name": "now","x": 1}',
        '["x"]',
        "{} ",
    ):
        assert not allows(held, text), text
    _, held = ask(LLAMA, tools=[tool(strict=True)], response_format={"type": "json_object"})
    assert allows(held, LLAMA_CALL)
    assert allows(held, '{"town": "Oslo"}')
    assert not allows(held, '{"name": "weather", "parameters": {"town": "Oslo"}}')


def test_other_formats_exclude_texts_that_begin_like_json_calls() -> None:
    _, held = ask(LLAMA, tools=[tool()], structured_outputs={"regex": ".*"})
    for text in ("words", "", "{", '{"name": "weather", "p', LLAMA_CALL):
        assert allows(held, text)
    assert not allows(held, '{"name": "weather", "parameters": 5}')
    _, held = ask(LLAMA, tools=[tool()], structured_outputs={"choice": ['{"a": 1}', "no"]})
    for text in ("no", '{"a": 1}', LLAMA_CALL):
        assert allows(held, text)
    assert not allows(held, '{"a": 2}')
    compact = {"json": {"type": "object"}, "disable_any_whitespace": True}
    _, held = ask(LLAMA, tools=[tool()], structured_outputs=compact)
    assert allows(held, LLAMA_CALL)
    assert allows(held, '{"name":"weather","parameters":5}')
    assert not allows(held, '{"name": "weather"}')


ODD = '{"a": "<tool_call>\\n{\\"name\\": \\"weather\\"} [TOOL_CALLS]"}'
SAID = (
    (LLAMA, LLAMA_CALL, {"city": "Oslo"}),
    (LLAMA, '{"name": "weather", "parameter": {"city": "Oslo"}}', None),
    (LLAMA, '{"name": "weather"}', None),
    (LLAMA, '{"parameters": {}, "name": "weather"}', None),
    (BARE, BARE_CALL, {"city": "Oslo"}),
    (BARE, '{"name": "weather", "arguments": {}}', None),
    (HERMES, call(city="Oslo"), {"city": "Oslo"}),
    (HERMES, ODD, None),
)


@each_case(("template", "script", "arguments"), SAID)
@each_case("pieces", [1, 3, 1000])
@each_case("stream", [False, True])
def test_with_a_format_an_answer_that_begins_as_a_call_is_one(
    template: str, script: str, arguments: Any, pieces: int, *, stream: bool
) -> None:
    scripts = [script[at : at + pieces] for at in range(0, len(script), pieces)]
    asked = {"tools": [tool()], "response_format": {"type": "json_object"}}
    reply, _ = ask(template, script=scripts, stream=stream, **asked)
    if stream:
        deltas = [choice["delta"] for one in reply.events[:-1] for choice in one["choices"]]
        content = "".join(delta.get("content") or "" for delta in deltas)
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
        names = [part["name"] for part in parts if "name" in part]
        streamed = "".join(part["arguments"] for part in parts)
        reason = reply.events[-2]["choices"][0]["finish_reason"]
    else:
        (choice,) = reply.json["choices"]
        content, reason = choice["message"]["content"] or "", choice["finish_reason"]
        made = [one["function"] for one in choice["message"].get("tool_calls", [])]
        names, streamed = [one["name"] for one in made], "".join(one["arguments"] for one in made)
    if arguments is None:
        assert (content, names, reason) == (script, [], "stop")
    else:
        assert (content, names, reason) == ("", ["weather"], "tool_calls")
        assert json.loads(streamed) == arguments


def test_required_calls_of_dialects_without_json_are_written_in_json() -> None:
    text = call(city="Oslo")
    reply, held = ask(CODER, script=text, tools=[tool()], tool_choice="required")
    assert allows(held, text)
    (made,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


@each_case(
    ("template", "body", "param"),
    [
        (CODER, {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (CODER, {"tools": [tool(strict=True)]}, "tools"),
        (CODER, {"response_format": FORMAT}, "response_format"),
        (LLAMA, {"response_format": EITHER}, "response_format"),
        (BARE, {"structured_outputs": {"json": {"type": "array"}}}, "structured_outputs"),
        (LLAMA, {"structured_outputs": {"choice": ["a", LLAMA_CALL]}}, "structured_outputs"),
        (LLAMA, {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
         "structured_outputs"),
        (HERMES, {"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs"),
        (OPENED, {"tools": [], "structured_outputs": {"grammar": 'start: "a"'}},
         "structured_outputs"),
        (HERMES, {"tool_choice": "required", "settings": {"tool_call_parser": "none"}},
         "tool_choice"),
    ],
)  # fmt: skip
def test_unsupported_constraints_are_rejected_by_name(
    template: str, body: dict[str, Any], param: str
) -> None:
    reply, _ = ask(template, **{"tools": [tool()], **body})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    marks = ("<tool_call>", "</tool_call>")
    _, held = ask(marks=marks, tools=[tool()], tool_choice="required")
    assert held is not None
    assert "<[200]>" in held.text
    assert "<tool_call>" not in held.text
