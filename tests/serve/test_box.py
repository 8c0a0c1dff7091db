"""The built-in model, served: a forced call and the loop of docs/tools.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.models.model_folder import box_path
from tests.serve.running_server import RunningServer

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    assert city == "Paris"
    return "sunny"


FUNCTIONS = {"get_weather": get_weather}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        RunningServer(box_path(), "--threads", "1", "--speculate", "draft") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        yield client


def test_answers_are_the_same_with_and_without_the_draft_model(client: openai.OpenAI) -> None:
    def told(**fields: Any) -> str | None:
        answer = client.chat.completions.create(
            model="box",
            messages=[{"role": "user", "content": "Tell me a story about a cat."}],
            seed=3,
            max_tokens=60,
            extra_body=fields,
        )
        return answer.choices[0].message.content

    assert told() == told(speculation="off")


def test_a_forced_call_names_the_city(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="box",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_the_model_calls_and_reads_the_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {"model": "box", "messages": messages, "tools": TOOLS, "temperature": 0}
    message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        assert call.type == "function"
        function = FUNCTIONS[call.function.name]
        result = function(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(messages) == 3
    said = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert "Paris" in said
    assert "sunny" in said
