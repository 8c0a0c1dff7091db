"""litellm: chats and completions by its routes, streams, tools, formats, its errors and retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

pytest.importorskip("litellm", reason="not installed here; `make clients` has it")

import litellm

from quire.base.errors import OverloadedError, TenantLimit, WorkerError
from tests.clients.scripts import TEMPLATE, WEATHER, call, pieces
from tests.serve.scripted_server import ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "Who is Tom?"}]
# Provider prefixes for this server in litellm's configuration.
ROUTES = ["openai/box", "hosted_vllm/box", "custom_openai/box"]


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    kind: Literal["cat", "dog"]
    is_here: bool


def at(url: str, **options: Any) -> dict[str, Any]:
    plain = {"api_base": url, "api_key": "none", "num_retries": 0, "messages": MESSAGES}
    return {
        "model": "openai/box",
        "max_tokens": 64,
        "temperature": 0,
        "seed": 3,
        **plain,
        **options,
    }


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(TEMPLATE, [["a", "b"]]) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
def test_whole_and_streamed_answers_are_equal_by_each_route(box: str, route: str) -> None:
    asked = at(box, model=route)
    whole = litellm.completion(**asked)
    text = whole.choices[0].message.content
    assert text
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    # The chunk with the usage has no choices; releases of litellm differ in whether they drop it.
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == text
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == text
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    if route.startswith("hosted_vllm"):
        return  # by this route litellm reports its own estimate instead of the server's count
    (told,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    for usage in (told, built.usage):
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_asynchronous_interface_gives_the_same_answer(box: str) -> None:
    asked = at(box)

    async def talk() -> tuple[str, str]:
        whole = await litellm.acompletion(**asked)
        said = ""
        async for chunk in await litellm.acompletion(**asked, stream=True):
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
        return whole.choices[0].message.content, said

    text = litellm.completion(**asked).choices[0].message.content
    assert asyncio.run(talk()) == (text, text)


def test_several_choices_and_several_conversations(box: str) -> None:
    answer = litellm.completion(**at(box, n=3, logprobs=True, top_logprobs=2))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].logprob < 0
    asked = {**at(box), "messages": [MESSAGES, [{"role": "user", "content": "Hello"}]]}
    first, second = litellm.batch_completion(**asked)
    alone = litellm.completion(**at(box)).choices[0].message.content
    assert first.choices[0].message.content == alone != second.choices[0].message.content


@pytest.mark.parametrize("route", ["text-completion-openai/box", "openai/box", "hosted_vllm/box"])
def test_completions_whole_and_streamed(box: str, route: str) -> None:
    asked = at(box, model=route, prompt="Once upon", max_tokens=12)
    del asked["messages"]
    whole = litellm.text_completion(**asked)
    assert whole.choices[0].text
    streamed = litellm.text_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == whole.choices[0].text
    assert whole.usage.completion_tokens == 12


def test_our_own_fields_pass_through(box: str) -> None:
    asked = at(box, top_k=3, temperature=1.0, user="me", metadata={"a": "b"})
    first = litellm.completion(**asked, extra_body={"min_p": 0.1, "ignore_eos": True})
    assert first.usage.completion_tokens == 64
    with pytest.raises(litellm.BadRequestError, match="frobnicate"):
        litellm.completion(**at(box), extra_body={"frobnicate": 1})


@pytest.mark.parametrize("route", ROUTES)
def test_answers_follow_the_schema_of_a_class(tools: str, route: str) -> None:
    asked = at(tools, model=route, response_format=Pet)
    whole = litellm.completion(**asked).choices[0].message.content
    assert Pet.model_validate_json(whole, extra="forbid")
    streamed = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole


def test_answers_are_json_if_an_object_is_requested() -> None:
    with ScriptedServer(TEMPLATE, [pieces('{"a": 1}')]) as server:
        asked = at(f"{server.url}/v1", model="openai/fake", response_format={"type": "json_object"})
        assert json.loads(litellm.completion(**asked).choices[0].message.content) == {"a": 1}
        held = server.engine.asked[0].sampling.structured_outputs
        assert held is not None
        assert held.text == '{"type":"object"}'


@pytest.mark.parametrize("route", ROUTES)
def test_a_required_tool_is_called(tools: str, route: str) -> None:
    pet = {"name": "pet", "parameters": Pet.model_json_schema()}
    asked = at(
        tools,
        model=route,
        tools=[{"type": "function", "function": pet}],
        tool_choice={"type": "function", "function": {"name": "pet"}},
    )
    whole = litellm.completion(**asked).choices[0]
    (called,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert called.function.name == "pet"
    assert Pet.model_validate_json(called.function.arguments, extra="forbid")
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (streamed,) = built.choices[0].message.tool_calls
    assert streamed.function.arguments == called.function.arguments
    assert built.choices[0].finish_reason == "tool_calls"


def test_a_conversation_with_tools_continues_to_an_answer() -> None:
    text = "Let me look.\n" + call("weather", city="Oslo") + call("weather", city="Bérgen")
    with ScriptedServer(TEMPLATE, [pieces(text), ["Cold."]]) as server:
        asked = at(f"{server.url}/v1", model="openai/fake", tools=[WEATHER])
        message = litellm.completion(**asked).choices[0].message
        assert message.content == "Let me look."
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": one.function.arguments}
            for one in message.tool_calls
        ]
        asked["messages"] = [*MESSAGES, message.model_dump(), *results]
        assert litellm.completion(**asked).choices[0].message.content == "Cold."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather {"city": "Bérgen"}</tool_call>;tool:{"city": "Oslo"};' in prompt


@pytest.mark.parametrize("route", ["openai/fake", "hosted_vllm/fake"])
def test_reasoning_is_separate(route: str) -> None:
    template = TEMPLATE + "{# </think> #}"
    with ScriptedServer(template, [["<think>So.</think>", "A ", "cat."]]) as server:
        asked = at(f"{server.url}/v1", model=route)
        message = litellm.completion(**asked).choices[0].message
        assert (message.reasoning_content, message.content) == ("So.", "A cat.")
        built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
        message = built.choices[0].message
        assert (message.reasoning_content, message.content) == ("So.", "A cat.")


def test_rejections_raise_its_own_classes(box: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**at(box, model="openai/other"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**at(box, temperature=-1))
    long = [{"role": "user", "content": "dog " * 600}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**at(box, messages=long))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TenantLimit("enough", retry_after_s=1), "RateLimitError"),
        (WorkerError("gone"), "InternalServerError"),
        (OverloadedError("full", retry_after_s=1), "ServiceUnavailableError"),
    ],
)
def test_failures_raise_its_own_classes(
    scripted: ScriptedServer, error: Exception, kind: str
) -> None:
    scripted.engine.fails_with = error
    with pytest.raises(getattr(litellm, kind), match=str(error)):
        litellm.completion(**at(f"{scripted.url}/v1", model="openai/fake"), max_retries=0)


def test_a_slow_server_raises_its_timeout(scripted: ScriptedServer) -> None:
    scripted.engine.pause = asyncio.Event().wait  # forever
    with pytest.raises(litellm.Timeout):
        litellm.completion(
            **at(f"{scripted.url}/v1", model="openai/fake"), timeout=0.2, max_retries=0
        )
