"""langchain-openai: messages, streams, batches, structured output by each method, tools, usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pydantic
import pytest

pytest.importorskip("langchain_openai", reason="not installed here; `make clients` has it")

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.scripted_server import ScriptedServer

ASKED = "Who is Tom?"


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    kind: Literal["cat", "dog"]
    is_here: bool


@tool
def weather(city: Literal["Oslo", "Bergen"], days: Literal[1, 2, 3] = 3) -> str:
    """Return the weather."""
    return f"cold in {city} for {days} days"


def chat(url: str, **options: Any) -> ChatOpenAI:
    options = {"model": "box", "temperature": 0, "max_tokens": 64, "seed": 3, **options}
    return ChatOpenAI(base_url=url, api_key="none", max_retries=0, **options)


def test_whole_streamed_and_batched_answers_are_equal(box: str) -> None:
    model = chat(box)
    whole = model.invoke([SystemMessage("You are kind."), HumanMessage(ASKED)])
    alone = model.invoke(ASKED)
    assert alone.content
    assert model.batch([ASKED, "Hello"])[0].content == alone.content
    streamed = list(model.stream(ASKED))
    assert "".join(chunk.text for chunk in streamed) == alone.text
    assert len(streamed) > 4
    assert streamed[0].id == streamed[-1].id
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.response_metadata["system_fingerprint"]


def test_the_asynchronous_interface_gives_the_same_answer(box: str) -> None:
    model = chat(box, stream_usage=True)

    async def talk() -> tuple[Any, list[Any], list[Any]]:
        whole = await model.ainvoke(ASKED)
        streamed = [chunk async for chunk in model.astream(ASKED)]
        return whole, streamed, await model.abatch([ASKED, "Hello"])

    whole, streamed, batch = asyncio.run(talk())
    assert "".join(chunk.text for chunk in streamed) == whole.text == batch[0].text != ""
    (told,) = [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata]
    used = whole.usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert told[name] == used[name] > 0


def test_several_choices_stop_words_and_log_probabilities(box: str) -> None:
    model = chat(box, n=8, temperature=1.0)
    (several,) = model.generate([[HumanMessage(ASKED)]]).generations
    assert len(several) == 8
    assert len({answer.text for answer in several}) > 1
    alone = chat(box)
    text = alone.invoke(ASKED).text
    cut = alone.invoke(ASKED, stop=[text[4]])
    assert cut.text == text[: text.index(text[4])]
    scored = alone.bind(logprobs=True, top_logprobs=2).invoke(ASKED)
    content = scored.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content).startswith(text[:8])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True, False])
def test_structured_output_by_each_method(
    tools: str, method: Literal["json_schema", "function_calling"], strict: bool | None
) -> None:
    structured = chat(tools).with_structured_output(
        Pet, method=method, strict=strict, include_raw=True
    )
    answer: Any = structured.invoke(ASKED)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], Pet)
    last: Any = list(chat(tools).with_structured_output(Pet, method=method).stream(ASKED))[-1]
    assert last == answer["parsed"]


def test_structured_output_in_json_mode() -> None:
    with ScriptedServer(TEMPLATE, [pieces('{"kind": "dog", "is_here": true}')]) as server:
        model = chat(f"{server.url}/v1", model="fake")
        answer = model.with_structured_output(Pet, method="json_mode").invoke("A pet, as JSON")
        assert answer == Pet(kind="dog", is_here=True)
        (asked,) = server.engine.asked
        assert asked.sampling.structured_outputs is not None
        assert asked.sampling.structured_outputs.text == '{"type":"object"}'


@pytest.mark.parametrize("choice", ["any", "required", "weather", True])
@pytest.mark.parametrize("strict", [None, True])
def test_a_required_tool_is_called(tools: str, choice: Any, strict: bool | None) -> None:
    bound = chat(tools).bind_tools(
        [weather], tool_choice=choice, strict=strict, parallel_tool_calls=False
    )
    whole = bound.invoke(ASKED)
    (called,) = whole.tool_calls
    assert weather.invoke(called).content.startswith("cold in ")
    joined: Any = None
    for chunk in bound.stream(ASKED):
        joined = chunk if joined is None else joined + chunk
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [
        ("weather", called["args"])
    ]
    assert joined.response_metadata["finish_reason"] == "tool_calls"


def test_a_conversation_with_tools_continues_to_an_answer() -> None:
    scripts = [pieces("Let me look.\n" + call("weather", city="Oslo", days=2)), ["Cold."]]
    with ScriptedServer(TEMPLATE, scripts) as server:
        model = chat(f"{server.url}/v1", model="fake").bind_tools([weather])
        messages: list[Any] = [HumanMessage("Oslo?")]
        messages.append(model.invoke(messages))
        assert messages[-1].text == "Let me look."
        (called,) = messages[-1].tool_calls
        messages.append(weather.invoke(called))
        assert isinstance(messages[-1], ToolMessage)
        assert model.invoke(messages).text == "Cold."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather {"city": "Oslo", "days": 2}</tool_call>' in prompt
        assert "tool:cold in Oslo for 2 days;" in prompt


def test_a_call_with_invalid_json_is_reported_and_can_be_sent_back() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>'
    with ScriptedServer(TEMPLATE, [pieces(broken), ["Sorry."]]) as server:
        model = chat(f"{server.url}/v1", model="fake").bind_tools([weather])
        told = model.invoke("Oslo?")
        assert told.tool_calls == []
        (invalid,) = told.invalid_tool_calls
        assert (invalid["name"], invalid["args"]) == ("weather", '{"city": Oslo}')
        history = [HumanMessage("Oslo?"), told, ToolMessage("no JSON", tool_call_id=invalid["id"])]
        assert model.invoke(history).text == "Sorry."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather "{\\"city\\": Oslo}"</tool_call>' in prompt


def test_reasoning_is_left_out_of_the_text() -> None:
    template = TEMPLATE + "{# </think> #}"
    with ScriptedServer(template, [["<think>So.</think>", "Tom ", "is a cat."]]) as server:
        model = chat(f"{server.url}/v1", model="fake", stream_usage=True)
        answer = model.invoke(ASKED)
        assert answer.text == "Tom is a cat."
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_token_details"]["reasoning"] == 1
        assert "".join(chunk.text for chunk in model.stream(ASKED)) == "Tom is a cat."


def test_a_too_long_conversation_is_recognized(box: str) -> None:
    with pytest.raises(ContextOverflowError):
        chat(box).invoke("dog " * 600)


def test_completions_whole_streamed_and_batched(box: str) -> None:
    model = OpenAI(
        model="box", base_url=box, api_key="none", max_retries=0, max_tokens=12, temperature=0
    )
    text = model.invoke("Once upon")
    assert text
    assert "".join(model.stream("Once upon")) == text
    assert model.batch(["The sea", "Once upon"])[1] == text
    told = model.generate(["Once upon", "The sea"])
    assert told.llm_output is not None
    assert told.llm_output["token_usage"]["completion_tokens"] == 24


def test_closing_a_stream_ends_its_request() -> None:
    with ScriptedServer(TEMPLATE, [["a", "b"]]) as server:
        server.engine.pause = asyncio.Event().wait  # forever

        async def leave() -> None:
            model = chat(f"{server.url}/v1", model="fake")
            stream: AsyncIterator[AIMessage] = model.astream(ASKED)  # type: ignore[assignment]
            async for chunk in stream:
                if chunk.text:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave())
    assert server.engine.closed_early == [server.engine.asked[0].request_id]
