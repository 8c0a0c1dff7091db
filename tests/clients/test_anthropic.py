"""Anthropic's client: messages, streams, tools, cached prefixes, batches, its error classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import BOX
from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.running_server import RunningServer
from tests.serve.scripted_server import ScriptedServer

anthropic = pytest.importorskip("anthropic")

ASKED: Any = {
    "model": "box",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Who is Tom?"}],
    "extra_body": {"seed": 3},
}
PARAMS: Any = {name: value for name, value in ASKED.items() if name != "extra_body"}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("batches") / "batches.sqlite"
    with RunningServer(BOX, "--threads", "1", "--batch-store", str(store)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with opened(server) as client:
        yield client


def opened(server: RunningServer | ScriptedServer, key: str = "none") -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def test_whole_and_streamed_messages_are_equal(client: Any, server: RunningServer) -> None:
    raw = client.messages.with_raw_response.create(**ASKED)
    whole = raw.parse()
    assert raw.headers["request-id"] == whole.id
    with client.messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text != ""
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def talk() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            return str((await client.messages.create(**ASKED)).content[0].text)

    assert asyncio.run(talk()) == text
    counted = client.messages.count_tokens(model="box", messages=ASKED["messages"])
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_ends_with_its_budget(tmp_path: Path) -> None:
    """The template opens the reasoning, which the built-in model never closes."""
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>{# </think> #}"
    )
    thinking: Any = {"type": "enabled", "budget_tokens": 14}
    flags = ("--threads", "1", "--chat-template", str(template))
    with RunningServer(BOX, *flags) as server, opened(server) as client:
        whole = client.messages.create(**ASKED, thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        with client.messages.stream(**ASKED, thinking=thinking) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].thinking == whole.content[0].thinking
        assert final.content[1].text == whole.content[1].text
        assert final.content[1].text.strip()
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens is 1; the mark"):
            client.messages.create(**ASKED, thinking={**thinking, "budget_tokens": 1})


def test_marked_prefixes_are_counted_once_and_read_afterwards(client: Any) -> None:
    marked = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Ann has a dog. " * 12, "cache_control": marked}]
    first = client.messages.create(**ASKED, system=system).usage
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens > 0
    assert first.cache_creation.ephemeral_5m_input_tokens == 0
    second = client.messages.create(**ASKED, system=system).usage
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="at most 4"):
        client.messages.create(**ASKED, system=system * 5)


def test_a_batch_is_polled_and_its_results_read(client: Any) -> None:
    alone = client.messages.create(**ASKED).content[0].text
    batch = client.messages.batches.create(
        requests=[
            {"custom_id": "one", "params": {**PARAMS, "seed": 3}},
            {"custom_id": "two", "params": {**PARAMS, "temperature": 2}},
        ]
    )
    assert batch.id in [each.id for each in client.messages.batches.list()]
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert batch.request_counts.processing == 2
    one, two = client.messages.batches.results(batch.id)
    assert one.result.message.content[0].text == alone
    assert two.result.type == "errored"
    assert two.result.error.error.type == "invalid_request_error"
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    assert client.messages.batches.cancel(batch.id).processing_status == "ended"
    client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_models_are_listed_with_the_clients_key() -> None:
    names = ("--served-model-name", "box", "--served-model-name", "other")
    with (
        RunningServer(BOX, "--threads", "1", *names, "--api-key", "secret-key-1") as server,
        opened(server, "secret-key-1") as client,
        opened(server, "no") as stranger,
    ):
        assert [model.id for model in client.models.list(limit=1)] == ["box", "other"]
        (second,) = client.models.list(after_id="box").data
        assert second == client.models.retrieve("other")
        assert (second.lifecycle, second.max_input_tokens, second.max_tokens) == (
            "active",
            512,
            512,
        )
        assert second.created_at.year > 2000
        assert [model.id for model in client.beta.models.list()] == ["box", "other"]
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("none")
        with pytest.raises(anthropic.AuthenticationError):
            stranger.models.list()


def test_the_beta_client_gets_the_same_message(client: Any) -> None:
    plain = client.messages.create(**ASKED)
    sent = {**ASKED, "speed": "standard", "betas": ["context-1m-2025-08-07"]}
    beta = client.beta.messages.create(**sent)
    assert beta.content[0].text == plain.content[0].text
    with client.beta.messages.stream(**ASKED) as stream:
        assert stream.get_final_message().content[0].text == plain.content[0].text
    counted = client.beta.messages.count_tokens(model="box", messages=ASKED["messages"])
    usage = beta.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert (usage.service_tier, usage.speed) == ("standard", "standard")
    assert usage.output_tokens_details.thinking_tokens == 0
    assert list(client.beta.messages.batches.list(limit=1)) == []


def test_a_message_without_output_fills_the_cache(client: Any) -> None:
    said: Any = [{"role": "user", "content": "Ben has a red ball. " * 12}]
    empty = client.messages.create(**{**ASKED, "messages": said, "max_tokens": 0})
    assert (empty.content, empty.stop_reason) == ([], "max_tokens")
    assert empty.usage.output_tokens == 0
    after = client.messages.create(**{**ASKED, "messages": said}).usage
    assert after.cache_read_input_tokens > 0


def test_parallel_tools_are_called_and_their_results_sent() -> None:
    calls = call("weather", city="Oslo") + call("weather", city="Bergen")
    with ScriptedServer(TEMPLATE, [pieces(calls), ["Cold."]]) as server, opened(server) as client:
        messages: list[Any] = [{"role": "user", "content": "Where is it cold?"}]
        asked: Any = {"model": "fake", "max_tokens": 64, "tools": [WEATHER]}
        with client.messages.stream(**asked, messages=messages) as stream:
            answer = stream.get_final_message()
        assert [block.input["city"] for block in answer.content] == ["Oslo", "Bergen"]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "cold"}
            for block in answer.content
        ]
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": results},
        ]
        final = client.messages.create(**asked, messages=messages)
    assert final.content[0].text == "Cold."


def test_refusals_raise_the_clients_classes(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**{**ASKED, "extra_body": {"temperature": 2}})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
