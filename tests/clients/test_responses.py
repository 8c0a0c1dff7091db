"""The official client with the Responses API: its own types, helpers, tools, state, background."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.scripted_server import ScriptedServer

ASKED: Any = {
    "model": "box",
    "input": "Who is Tom?",
    "max_output_tokens": 24,
    "extra_body": {"seed": 3},
}
FAKE: Any = {"model": "fake"}
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": False,
}


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    kind: Literal["cat", "dog"]
    is_here: bool


@pytest.fixture
def client(box: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=box, api_key="none", max_retries=0) as client:
        yield client


def opened(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check_types(client: openai.OpenAI, **asked: Any) -> list[Any]:
    """Return the events of a stream; check each with the client's types, without its leniency."""
    found = []
    with client.responses.with_streaming_response.create(**asked, stream=True) as raw:
        for line in raw.iter_lines():
            if line.startswith("data: "):
                found.append(EVENT.validate_json(line.removeprefix("data: ")))
    assert [event.sequence_number for event in found] == [*range(len(found))]
    return found


def test_whole_and_streamed_responses_are_equal_and_have_the_clients_types(
    client: openai.OpenAI,
) -> None:
    raw = client.responses.with_raw_response.create(**ASKED)
    whole = raw.parse()
    Response.model_validate_json(raw.text)
    assert raw.headers["x-request-id"] == whole.id
    events = check_types(client, **ASKED)
    assert events[-1].response.output_text == whole.output_text != ""
    asked = {**ASKED, "max_output_tokens": 200}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        if kinds[-1] == "response.completed":
            assert stream.get_final_response().output_text.startswith(whole.output_text)
    assert kinds[:2] == ["response.created", "response.in_progress"]


def test_the_asynchronous_client_gives_the_same_answer(client: openai.OpenAI, box: str) -> None:
    async def talk() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=box, api_key="none") as client:
            whole = await client.responses.create(**ASKED)
            said = ""
            async for event in await client.responses.create(**ASKED, stream=True):
                if event.type == "response.output_text.delta":
                    said += event.delta
            return whole.output_text, said

    text = client.responses.create(**ASKED).output_text
    assert asyncio.run(talk()) == (text, text)


def test_answers_are_parsed_into_classes(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": 60, "text_format": Pet}
    parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Pet)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == parsed


def test_stored_responses_are_retrieved_listed_continued_and_deleted(
    client: openai.OpenAI,
) -> None:
    first = client.responses.create(**ASKED)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    (item,) = client.responses.input_items.list(first.id)
    assert (item.type, item.content[0].text) == ("message", "Who is Tom?")
    second = client.responses.create(**{**ASKED, "previous_response_id": first.id})
    said = [{"role": "user", "content": ASKED["input"]}]
    whole: Any = [*said, *(each.to_dict() for each in first.output), *said]
    assert client.responses.create(**{**ASKED, "input": whole}).output_text == second.output_text
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(first.id)
        assert refused.value.code == "response_not_found"


def test_a_conversation_is_made_continued_and_counted(client: openai.OpenAI) -> None:
    made = client.conversations.create(
        metadata={"a": "b"}, items=[{"type": "message", "role": "user", "content": "Who is Tom?"}]
    )
    first = client.responses.create(
        model="box", conversation=made.id, max_output_tokens=24, store=False, extra_body={"seed": 3}
    )
    assert first.output_text == client.responses.create(**ASKED).output_text
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in items] == ["message", "message"]
    # An item of the conversation alone, which no stored response has.
    reference: Any = [{"type": "item_reference", "id": items[1].id}]
    count = client.responses.input_tokens.count
    counted = count(conversation=made.id, input=reference)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens > count(conversation=made.id).input_tokens > 0
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    client.conversations.delete(made.id)


def test_a_count_is_that_of_the_response(client: openai.OpenAI) -> None:
    asked: Any = {"input": "Who is Tom?", "instructions": "Be short."}
    response = client.responses.create(**{**ASKED, **asked})
    assert response.usage is not None
    counted = client.responses.input_tokens.count(model="box", **asked).input_tokens
    assert counted == response.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="not compacted"):
        client.responses.compact(model="gpt-5", input="a")


def test_reasoning_is_sealed_and_read_again() -> None:
    template = TEMPLATE + "{# <think></think> #}"
    with ScriptedServer(template, [["<think>Hm.</think>Yes."]]) as server, opened(server) as client:
        first = client.responses.create(**FAKE, input="hi")
        thought = first.output[0]
        assert thought.type == "reasoning"
        assert thought.encrypted_content
        stored = client.responses.retrieve(first.id).output[0]
        assert stored.type == "reasoning"
        assert stored.encrypted_content is None
        shown = client.responses.retrieve(first.id, include=["reasoning.encrypted_content"])
        assert shown.output[0] == thought
        sent: Any = [{"type": "reasoning", "encrypted_content": thought.encrypted_content}]
        more = client.responses.create(**FAKE, input=[*sent, {"role": "user", "content": "And?"}])
        (item, _) = client.responses.input_items.list(more.id, order="asc")
        assert item.to_dict()["summary"] == []


def test_labels_are_in_the_clients_types(client: openai.OpenAI) -> None:
    labels: Any = {
        "user": "me",
        "safety_identifier": "id",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 3,
        "tools": [WEATHER],
        "tool_choice": "none",
        "reasoning": {"effort": "low"},
    }
    raw = client.responses.with_raw_response.create(**ASKED, **labels)
    response = Response.model_validate_json(raw.text).to_dict()
    assert {name: response[name] for name in labels if name != "reasoning"} == {
        name: labels[name] for name in labels if name != "reasoning"
    }


def test_functions_run_until_there_is_an_answer() -> None:
    calls = call("weather", city="Oslo") + call("weather", city="Bérgen")
    scripts = [pieces(calls), ["Cold."]]
    with ScriptedServer(TEMPLATE, scripts) as server, opened(server) as client:
        context: list[Any] = [{"role": "user", "content": "Where is it cold?"}]
        ran = []
        while True:
            with client.responses.stream(**FAKE, input=context, tools=[WEATHER]) as stream:
                response = stream.get_final_response()
            context += response.output
            called = [item for item in response.output if item.type == "function_call"]
            if not called:
                break
            for each in called:
                ran.append(json.loads(each.arguments)["city"])
                output = {"type": "function_call_output", "call_id": each.call_id, "output": "cold"}
                context.append(output)
        assert ran == ["Oslo", "Bérgen"]
        assert response.output_text == "Cold."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather {"city": "Bérgen"}</tool_call>;tool:cold;tool:cold;' in prompt


def test_every_kind_of_event_has_the_clients_type() -> None:
    text = f"<think>Look.</think>I look.{call('weather', city='Oslo')}"
    template = TEMPLATE + "{# <think></think> #}"
    with ScriptedServer(template, [pieces(text)]) as server, opened(server) as client:
        include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        events = check_types(client, **FAKE, input="hi", tools=[WEATHER], include=include)
        kinds = [item.type for item in events[-1].response.output]
        assert kinds[-2:] == ["message", "function_call"]


def test_a_background_response_is_polled_cancelled_and_resumed() -> None:
    with ScriptedServer(TEMPLATE, [["Hel", "lo", "!"]]) as server, opened(server) as client:
        held = asyncio.Event()
        server.engine.pause = held.wait
        running = client.responses.create(**FAKE, input="hi", background=True)
        assert running.status == "queued"
        cancelled = client.responses.cancel(running.id)
        assert cancelled.status == client.responses.retrieve(running.id).status == "cancelled"
        server.engine.pause = None
        stream = client.responses.create(**FAKE, input="hi", background=True, stream=True)
        first = next(iter(stream))
        stream.close()
        assert first.type == "response.created"
        rest = list(
            client.responses.retrieve(
                first.response.id, stream=True, starting_after=first.sequence_number
            )
        )
        assert [event.sequence_number for event in rest] == [*range(1, len(rest) + 1)]
        assert rest[-1].type == "response.completed"
        assert client.responses.retrieve(first.response.id).output_text == "Hello!"
        with pytest.raises(openai.BadRequestError):
            client.responses.cancel(client.responses.create(**FAKE, input="hi").id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"conversation": 5}, "conversation"),
        ({"truncation": "disabled", "input": "dog " * 600}, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejections_raise_the_clients_classes(
    client: openai.OpenAI, fields: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**ASKED, "stream": stream, **fields})
    assert refused.value.param == param
