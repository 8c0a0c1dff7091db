"""The official client: its helpers, its error classes, its retries.

tests/serve covers the API's own answers; these tests cover what the client makes of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from quire.base.errors import (
    CapacityError,
    ContextTooLong,
    ModelError,
    OverloadedError,
    PoisonRequest,
    QuireError,
    SettingError,
    StepRowError,
    TenantLimit,
    TimedOut,
    WorkerError,
)
from tests.clients.scripts import TEMPLATE, WEATHER, call, pieces
from tests.serve.scripted_server import ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "Who is Tom?"}]
ASKED: Any = {"model": "box", "messages": MESSAGES, "seed": 3, "max_tokens": 24}
FAKE: Any = {"model": "fake", "messages": MESSAGES}


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    kind: Literal["cat", "dog"]
    is_here: bool


@pytest.fixture
def client(box: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=box, api_key="none", max_retries=0) as client:
        yield client


def opened(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def test_whole_and_helper_streamed_answers_are_equal(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED)
    with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content != ""
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage == whole.usage
    assert final.system_fingerprint == whole.system_fingerprint
    assert kinds.count("content.done") == 1
    assert kinds.count("content.delta") > 3


def test_the_asynchronous_client_gives_the_same_answer(client: openai.OpenAI, box: str) -> None:
    async def talk() -> tuple[str | None, str, str]:
        async with openai.AsyncOpenAI(base_url=box, api_key="none") as client:
            whole = await client.chat.completions.create(**ASKED)
            said = ""
            async for chunk in await client.chat.completions.create(**ASKED, stream=True):
                said += chunk.choices[0].delta.content or ""
            async with client.chat.completions.stream(**ASKED) as stream:
                final = await stream.get_final_completion()
            return whole.choices[0].message.content, said, final.choices[0].message.content or ""

    text = client.chat.completions.create(**ASKED).choices[0].message.content
    assert asyncio.run(talk()) == (text, text, text)


def test_raw_responses_and_lists_are_parsed(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    answer = raw.parse()
    assert raw.headers["x-request-id"] == answer.id == answer._request_id
    with client.chat.completions.with_streaming_response.create(**ASKED, stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert [model.id for model in client.models.list()] == ["box"]  # its own paging


def test_answers_are_parsed_into_classes_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**ASKED, response_format=Pet)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Pet)
    with client.chat.completions.stream(**ASKED, response_format=Pet) as stream:
        done = [event for event in stream if event.type == "content.done"]
    assert [event.parsed for event in done] == [parsed]


def test_a_truncated_answer_raises_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**ASKED, "max_tokens": 3}, response_format=Pet)


@pytest.mark.parametrize("strict", [True, False])
def test_a_class_as_a_tool_is_called_with_its_arguments(tools: str, strict: bool) -> None:
    tool: Any = openai.pydantic_function_tool(Pet)
    if not strict:  # like other libraries, without additionalProperties
        tool = {
            "type": "function",
            "function": {"name": "Pet", "parameters": Pet.model_json_schema()},
        }
    with openai.OpenAI(base_url=tools, api_key="none", max_retries=0) as client:
        asked: Any = {**ASKED, "max_tokens": 80, "tools": [tool], "tool_choice": "required"}
        for choice in ("required", {"type": "function", "function": {"name": "Pet"}}):
            asked |= {"tool_choice": choice, "parallel_tool_calls": False}
            answer = client.chat.completions.create(**asked)
            (called,) = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == "tool_calls"
            assert Pet.model_validate_json(called.function.arguments, extra="forbid")
        if strict:
            (called,) = client.chat.completions.parse(**asked).choices[0].message.tool_calls or []
            assert isinstance(called.function.parsed_arguments, Pet)


def test_functions_run_until_there_is_an_answer() -> None:
    scripts = [pieces(call("weather", city="Oslo") + call("weather", city="Bérgen")), ["Cold."]]
    with ScriptedServer(TEMPLATE, scripts) as server, opened(server) as client:
        messages, ran = list(MESSAGES), []
        while True:
            with client.chat.completions.stream(
                model="fake", messages=messages, tools=[WEATHER]
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for called in message.tool_calls:
                ran.append(json.loads(called.function.arguments)["city"])
                messages.append({"role": "tool", "tool_call_id": called.id, "content": "cold"})
        assert ran == ["Oslo", "Bérgen"]
        assert message.content == "Cold."
        prompt = bytes(server.engine.asked[1].prompt_ids).decode()
        assert '<tool_call>weather {"city": "Bérgen"}</tool_call>;tool:cold;tool:cold;' in prompt


REFUSALS = [
    ({"temperature": -1}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
    ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "invalid_value", "frobnicate"),
    ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
    (
        {"messages": [{"role": "user", "content": "dog " * 600}]},
        openai.BadRequestError,
        "context_length_exceeded",
        "messages",
    ),
]


@pytest.mark.parametrize(("fields", "kind", "code", "param"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_rejections_raise_the_clients_classes(
    client: openai.OpenAI, fields: Any, kind: Any, code: str, param: str, stream: bool
) -> None:
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{**ASKED, "stream": stream, **fields})
    assert (refused.value.code, refused.value.param) == (code, param)
    assert refused.value.request_id
    assert refused.value.body["message"]


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ContextTooLong("too long", param="prompt"), openai.BadRequestError, 400),
        (TenantLimit("enough", retry_after_s=1), openai.RateLimitError, 429),
        (StepRowError("row 3 is NaN"), openai.InternalServerError, 500),
        (WorkerError("gone"), openai.InternalServerError, 500),
        (OverloadedError("full", retry_after_s=1), openai.InternalServerError, 503),
        (TimedOut("too slow"), openai.InternalServerError, 504),
    ],
)
def test_failures_raise_the_clients_classes(error: Exception, kind: Any, status: int) -> None:
    with ScriptedServer(TEMPLATE, [["a", "b"]]) as server, opened(server) as client:
        server.engine.fails_with = error
        for stream in (False, True):
            with pytest.raises(kind) as failed:
                client.chat.completions.create(**FAKE, stream=stream)
            assert failed.value.status_code == status
            assert str(error) in failed.value.message
        server.engine.fails_after = 1
        with pytest.raises(openai.APIError, match=str(error)):
            for _ in client.chat.completions.create(**FAKE, stream=True):
                pass


def test_a_required_key_is_checked() -> None:
    with ScriptedServer(TEMPLATE, [["a"]], api_key=("secret",)) as server:
        with opened(server) as client, pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(**FAKE)
        assert refused.value.code == "invalid_api_key"
        with opened(server, api_key="secret") as client:
            assert client.chat.completions.create(**FAKE).choices[0].message.content == "a"


@pytest.mark.parametrize("kind", [OverloadedError, TenantLimit])
def test_retries_follow_retry_after(
    kind: type[OverloadedError], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    with ScriptedServer(TEMPLATE, [["a"]]) as server, opened(server, max_retries=2) as client:

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            server.engine.fails_with = None

        monkeypatch.setattr("openai._base_client.time.sleep", sleep)
        server.engine.fails_with = kind("full", retry_after_s=16.5)
        assert client.chat.completions.create(**FAKE).choices[0].message.content == "a"
        assert slept == [17.0]
        assert len(server.engine.asked) == 2


def test_permanent_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", slept.append)
    with ScriptedServer(TEMPLATE, [["a"]]) as server, opened(server, max_retries=5) as client:
        server.engine.fails_with = ContextTooLong("too long")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**FAKE)
        assert slept == []
        assert len(server.engine.asked) == 1


@pytest.mark.parametrize("kind", [ModelError, PoisonRequest, SettingError, CapacityError])
def test_failures_that_would_recur_are_not_retried(
    kind: type[QuireError], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("openai._base_client.time.sleep", slept.append)
    retries = openai.DEFAULT_MAX_RETRIES
    with ScriptedServer(TEMPLATE, [["a"]]) as server, opened(server, max_retries=retries) as client:
        server.engine.fails_with = kind("always")
        with pytest.raises(openai.InternalServerError, match="always"):
            client.chat.completions.create(**FAKE)
        assert slept == []
        assert len(server.engine.asked) == 1
        server.engine.fails_with = WorkerError("for now")
        with pytest.raises(openai.InternalServerError, match="for now"):
            client.chat.completions.create(**FAKE)
        assert len(slept) == retries


def test_choices_stream_in_any_order() -> None:
    with ScriptedServer(TEMPLATE, [["Hel", "lo"]]) as server, opened(server) as client:
        generate = server.engine.generate

        async def last_first(*args: Any, **options: Any) -> Any:
            deltas = [delta async for delta in generate(*args, **options)]
            for delta in sorted(deltas, key=lambda delta: -delta.index):
                yield delta

        server.engine.generate = last_first  # type: ignore[method-assign]
        with client.chat.completions.stream(**FAKE, n=3) as stream:
            choices = stream.get_final_completion().choices
        assert [choice.message.content for choice in choices] == ["Hello"] * 3
        assert [choice.index for choice in choices] == [0, 1, 2]


def test_labels_and_counts_are_in_the_clients_types(client: openai.OpenAI) -> None:
    labels: Any = {"metadata": {"a": "b"}, "service_tier": "auto"}
    answer = client.chat.completions.create(**ASKED, **labels)
    assert answer.service_tier == "default"
    assert answer.to_dict()["metadata"] == {"a": "b"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    for chunk in client.chat.completions.create(**ASKED, **labels, stream=True):
        assert chunk.service_tier == "default"
    (model,) = client.models.list()
    assert model.to_dict()["shutdown_date"] is None


def test_a_refusal_and_an_older_call_are_read(client: openai.OpenAI) -> None:
    def num_tokens(*said: Any) -> int:
        asked: Any = {**ASKED, "messages": [*MESSAGES, *said, *MESSAGES], "max_tokens": 1}
        usage = client.chat.completions.create(**asked).usage
        assert usage is not None
        return usage.prompt_tokens

    refused = {"role": "assistant", "content": None, "refusal": "No, no, no."}
    assert num_tokens(refused) == num_tokens({"role": "assistant", "content": "No, no, no."})
    audio = {"role": "assistant", "content": None, "audio": {"id": "a"}}
    with pytest.raises(openai.BadRequestError, match="audio"):
        num_tokens(audio)


def test_a_completion_of_null_is_one_of_nothing(client: openai.OpenAI) -> None:
    asked: Any = {"model": "box", "seed": 3, "max_tokens": 4}
    texts = [
        client.completions.create(**asked, prompt=prompt).choices[0].text for prompt in (None, "")
    ]
    assert texts[0] == texts[1]


def test_a_slow_server_raises_the_clients_timeout() -> None:
    with ScriptedServer(TEMPLATE, [["a", "b"]]) as server, opened(server) as client:
        server.engine.pause = asyncio.Event().wait  # forever
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).chat.completions.create(**FAKE)


def test_a_cancelled_task_ends_its_request() -> None:
    with ScriptedServer(TEMPLATE, [["a", "b"]]) as server:
        server.engine.pause = asyncio.Event().wait

        async def leave() -> None:
            begun = asyncio.Event()

            async def read() -> None:
                url = f"{server.url}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
                    async for chunk in await client.chat.completions.create(**FAKE, stream=True):
                        if chunk.choices[0].delta.content:
                            begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(leave())
        # Leaving the `with` waits for the server's end, which waits for its requests.
    assert server.engine.closed_early == [server.engine.asked[0].request_id]
