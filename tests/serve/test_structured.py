"""Structured output over sockets: the official client's helpers, errors, streams, concurrency."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

import quire
from tests.serve.running_server import RunningServer

BOX = Path(quire.__file__).parent / "models" / "box"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Who is Tom?"}]


class Person(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    is_here: bool


@pytest.fixture(scope="module")
def box() -> Iterator[RunningServer]:
    with RunningServer(BOX, "--max-num-seqs", "8", "--threads", "1") as server:
        yield server


@pytest.fixture
def client(box: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{box.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def body(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    named = {"name": "person", "schema": schema, "strict": True}
    response_format = {"type": "json_schema", "json_schema": named}
    return {"messages": MESSAGES, "response_format": response_format, "seed": 3, **more}


def test_the_official_client_parses_an_answer_into_its_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="box", messages=MESSAGES, response_format=Person, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(
        model="box", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=5
    )
    assert answer.choices[0].message.content.startswith("{")


def test_a_stream_equals_the_whole_answer(box: RunningServer) -> None:
    status, whole = box.post("/v1/chat/completions", body(n=3))
    assert status == 200, whole
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    said, usage = ["", "", ""], None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with box.stream("/v1/chat/completions", body(n=3, **options)) as reader:
        for event in reader:
            if event == "[DONE]":
                continue
            usage = event["usage"] or usage
            for choice in event["choices"]:
                said[choice["index"]] += choice["delta"].get("content") or ""
    assert said == texts
    assert usage == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_uncompilable_grammar_is_a_client_error_before_anything_is_sent(
    box: RunningServer, stream: bool
) -> None:
    entries = {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
    schema = {"properties": {"a": entries}}
    status, answer = box.post("/v1/chat/completions", body(schema, stream=stream))
    assert status == 400
    assert answer["error"]["param"] == "response_format"
    assert "uniqueItems (at #/properties/a/uniqueItems)" in answer["error"]["message"]
    asked = {"prompt": "a", "structured_outputs": {"regex": "(?=a)"}, "stream": stream}
    status, answer = box.post("/v1/completions", asked)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def test_a_schema_that_would_overflow_the_stack_fails_only_its_request(box: RunningServer) -> None:
    definitions = {
        f"d{level}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{level + 1}"}}}
        for level in range(2_500)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d2500": {}}}
    status, answer = box.post(
        "/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}
    )
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")
    assert "nests too deeply" in answer["error"]["message"]
    asked = {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}
    assert box.post("/v1/completions", asked)[0] == 200


def test_concurrent_requests_change_no_answer(box: RunningServer) -> None:
    asked = [body(seed=seed, max_tokens=60) for seed in range(12)]
    asked += [
        {"messages": MESSAGES, "structured_outputs": {"regex": "[a-z]{3,9}"}, "seed": seed}
        for seed in range(6)
    ]

    def answer(one: dict[str, Any]) -> str:
        status, reply = box.post("/v1/chat/completions", one)
        assert status == 200, reply
        return str(reply["choices"][0]["message"]["content"])

    alone = [answer(one) for one in asked]
    with ThreadPoolExecutor(18) as crowd:
        assert list(crowd.map(answer, asked)) == alone


def test_stop_strings_and_lengths_cut_and_are_reported(box: RunningServer) -> None:
    _, stopped = box.post("/v1/chat/completions", body(stop=['"age"']))
    choice = stopped["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", '"age"')
    assert '"age"' not in choice["message"]["content"]
    _, cut = box.post("/v1/chat/completions", body(max_tokens=4))
    choice = cut["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", '{"name"')
    assert cut["usage"]["completion_tokens"] == 4
