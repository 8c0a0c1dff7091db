"""Tools and reasoning over real sockets with the official client: whole, streamed, in a loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.serve.running_server import RunningServer
from tests.serve.scripted_server import ScriptedServer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %};{% endfor %}</think>"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
MESSAGES: Any = [{"role": "user", "content": "Oslo and Bergen?"}]
CALLS = (
    "<think>\nTwo cities.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bérgen 🌧"}}\n</tool_call>'
)
CITIES = ["Oslo", "Bérgen 🌧"]


def by(size: int, text: str = CALLS) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_is_read_whole_and_streamed_by_the_clients_helper(size: int) -> None:
    with (
        ScriptedServer(TEMPLATE, [by(size)]) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}
        whole = client.chat.completions.create(**asked)
        message = whole.choices[0].message
        assert message.content == "Let me look."
        assert message.reasoning_content == "Two cities."  # type: ignore[attr-defined]
        assert [
            json.loads(call.function.arguments)["city"] for call in message.tool_calls
        ] == CITIES
        assert whole.choices[0].finish_reason == "tool_calls"
        closed = CALLS.index("</think>") + len("</think>")
        assert whole.usage.completion_tokens_details.reasoning_tokens == closed // size
        with client.chat.completions.stream(
            **asked, stream_options={"include_usage": True}
        ) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        parsed = final.choices[0].message
        assert parsed.content == message.content
        assert [call.function.name for call in parsed.tool_calls] == [
            "weather",
            "weather",
        ]
        assert [call.function.arguments for call in parsed.tool_calls] == [
            call.function.arguments for call in message.tool_calls
        ]
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.usage == whole.usage
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.index for event in done] == [0, 1]
        assert len({call.id for call in [*parsed.tool_calls, *message.tool_calls]}) == 4


def test_a_loop_of_calls_and_results_ends_in_an_answer() -> None:
    scripts = [by(5), ["<think>So.</think>", "Cold ", "in both."]]
    with ScriptedServer(TEMPLATE, scripts) as server:

        async def talk() -> str:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                messages = list(MESSAGES)
                while True:
                    answer = await client.chat.completions.create(
                        model="fake", messages=messages, tools=TOOLS
                    )
                    message = answer.choices[0].message
                    if not message.tool_calls:
                        assert answer.choices[0].finish_reason == "stop"
                        return message.content or ""
                    messages.append(message)
                    messages += [
                        {
                            "role": "tool",
                            "tool_call_id": call.id,
                            "content": f"cold in {json.loads(call.function.arguments)['city']}",
                        }
                        for call in message.tool_calls
                    ]

        assert asyncio.run(talk()) == "Cold in both."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather {"city": "Oslo"}</tool_call>' in prompt
        assert "tool:cold in Oslo;tool:cold in Bérgen 🌧;" in prompt


def test_an_async_stream_separates_its_choices() -> None:
    with ScriptedServer(TEMPLATE, [by(9)]) as server:

        async def stream() -> list[dict[int, str]]:
            arguments: list[dict[int, str]] = [{}, {}, {}]
            ids: set[str] = set()
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                chunks = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, tools=TOOLS, n=3, stream=True
                )
                async for chunk in chunks:
                    for choice in chunk.choices:
                        for call in choice.delta.tool_calls or []:
                            said = arguments[choice.index]
                            if call.id is not None:
                                ids.add(call.id)
                                assert call.function.name == "weather"
                                assert call.index not in said
                            said[call.index] = said.get(call.index, "") + (
                                call.function.arguments or ""
                            )
            assert len(ids) == 6
            return arguments

        for said in asyncio.run(stream()):
            assert [json.loads(text)["city"] for text in said.values()] == CITIES


# Forced output of a model with random weights, over the real server and engine.
FORCED: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Bergen"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
SPELLED = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# MARKS #}"
)


@pytest.fixture(scope="module")
def forced(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    template.write_text(SPELLED.replace("MARKS", "<tool_call>"))
    flags = ("--threads", "1", "--chat-template", str(template))
    with (
        RunningServer(tiny, *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def checked(call: Any) -> str:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Oslo", "Bergen")
        assert arguments["days"] in range(1, 15)
    name: str = call.function.name
    return name


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called_with_arguments_of_its_schema(
    forced: openai.OpenAI, seed: int
) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": FORCED,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": seed,
        "temperature": 2.0,
    }
    whole = forced.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert checked(call) == "weather"
    assert whole.choices[0].message.content is None
    assert whole.choices[0].finish_reason == "tool_calls"
    said = ""
    for chunk in forced.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            said += part.function.arguments or ""
    assert said == call.function.arguments


def test_required_calls_are_in_every_choice_and_optional_ones_may_be(
    forced: openai.OpenAI,
) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": FORCED[:1],
        "tool_choice": "required",
        "n": 4,
        "seed": 5,
        "temperature": 2.0,
    }
    several = forced.chat.completions.create(**asked)
    for choice in several.choices:
        assert choice.finish_reason == "tool_calls"
        assert {checked(call) for call in choice.message.tool_calls} == {"weather"}
    alone = forced.chat.completions.create(**asked, parallel_tool_calls=False)
    assert [len(choice.message.tool_calls) for choice in alone.choices] == [1] * 4
    cut = forced.chat.completions.create(**asked, max_tokens=40)
    assert {choice.finish_reason for choice in cut.choices} <= {"length", "tool_calls"}


def test_a_stop_string_within_a_call_cuts_it_and_is_reported(forced: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": FORCED,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 2,
        "stop": ['"days"'],
    }
    choice = forced.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == '"days"'
    arguments = choice.message.tool_calls[0].function.arguments
    assert json.loads(arguments.strip().removesuffix(",") + "}")["city"] in ("Oslo", "Bergen")


def test_the_clients_parser_accepts_strict_tools(forced: openai.OpenAI) -> None:
    class Now(pydantic.BaseModel):
        zone: Literal["UTC", "CET"]

    answer = forced.chat.completions.parse(
        model="tiny",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Now)],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=4,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Now)
