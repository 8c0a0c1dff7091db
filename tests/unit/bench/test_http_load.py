"""The open loop over HTTP: requests, valid answers, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, WorkerError
from quire.bench.http_load import ServedModel, Target, address_of, open_loop, served_model
from quire.bench.workloads import RequestSpec
from tests.unit.bench.served import Answer, SmallServer, plain_answer

ASKS = [RequestSpec(prompt_ids=(5, 6, 7), output_tokens=4, arrival_s=0.05 * n) for n in range(3)]


@pytest.mark.parametrize("chunked", [True, False])
def test_every_request_is_answered_and_timed(chunked: bool) -> None:
    with SmallServer(chunked=chunked) as server:
        target = Target(url=server.url, model="small", api_key="secret")
        ended: list[int] = []
        found = asyncio.run(open_loop(target, ASKS, on_end=lambda: ended.append(1)))
    assert [one.error for one in found] == ["", "", ""]
    assert [one.output_tokens for one in found] == [4, 4, 4]
    assert [one.prompt_tokens for one in found] == [3, 3, 3]
    assert all(one.sent_s <= one.first_s <= one.last_s for one in found)
    assert len(ended) == 3
    headers, body = server.asked[0]
    assert headers["authorization"] == "Bearer secret"
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)


def test_text_is_sent_to_a_server_without_token_prompts() -> None:
    with SmallServer() as server:
        target = Target(url=server.url, model="small", as_text=True, extra=())
        asyncio.run(open_loop(target, ASKS[:1]))
    body = server.asked[0][1]
    assert isinstance(body["prompt"], str)
    assert len(body["prompt"].split()) == 3
    assert "ignore_eos" not in body


def _lines(*events: Any) -> Answer:
    return lambda _: (200, [f"data: {json.dumps(event)}" for event in events])


TOKEN = {"choices": [{"text": "a", "finish_reason": None}]}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda _: (503, ["busy"]), "HTTP 503: busy"),
        (_lines(TOKEN), "before [DONE]"),
        (_lines({"error": {"message": "too long"}}), "too long"),
        (_lines([1]), "not an object"),
        (lambda _: (200, ["data: {"]), "Expecting"),
        (lambda _: (200, ["data: [DONE]"]), "no token came"),
        (lambda body: plain_answer({**body, "max_tokens": 3}), "3 tokens came, 4 were asked for"),
        (_lines({"choices": 5}), "subscriptable"),
    ],
)
def test_a_wrong_answer_is_an_error_of_its_request(answer: Answer, told: str) -> None:
    with SmallServer(answer) as server:
        [found] = asyncio.run(open_loop(Target(url=server.url, model="x"), ASKS[:1]))
    assert told in found.error


def test_another_length_is_no_error_if_answers_may_end() -> None:
    with SmallServer(lambda body: plain_answer({**body, "max_tokens": 2})) as server:
        target = Target(url=server.url, model="x", exact=False)
        [found] = asyncio.run(open_loop(target, ASKS[:1]))
    assert (found.error, found.output_tokens) == ("", 2)


def test_a_silent_server_runs_into_the_time_limit() -> None:
    async def run() -> str:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            target = Target(url=f"http://127.0.0.1:{port}", model="x", timeout_s=0.2)
            [found] = await open_loop(target, ASKS[:1])
        return found.error

    assert "Timeout" in asyncio.run(run())


def test_the_served_model_of_the_list_is_used() -> None:
    with SmallServer() as server:
        found = asyncio.run(served_model(Target(url=server.url, model="")))
        assert found == ServedModel(name="small")
    with pytest.raises(WorkerError, match="check the address, as in"):
        asyncio.run(served_model(Target(url="http://127.0.0.1:9", model="")))


def test_addresses() -> None:
    for url, path in (("http://here:80/v1/", ""), ("http://here/llm/v1", "/llm"), ("here/v", "/v")):
        assert address_of(url).path == path
    assert (address_of("here").port, address_of("https://here").port) == (80, 443)
    assert address_of("https://here").tls is not None
    for wrong in ("ftp://here", "http://", "http://here:port"):
        with pytest.raises(InvalidParameter):
            address_of(wrong)
