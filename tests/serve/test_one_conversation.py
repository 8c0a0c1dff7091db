"""One conversation has the same token ids through each API that can express it.

At temperature 0.75 with two seeds, on a server with drafts and one without: the answer depends on
neither. APIs of texts are compared by text, which the ids determine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.router.tokenize_fields import tokenize_fields
from tests.serve.running_server import RunningServer

SYSTEM, USER = "a stone by the river", "the sea and the stone"
SAID = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
NUM_TOKENS = 24


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


SAMPLING: dict[str, Any] = {"ignore_eos": True, "temperature": 0.75, "top_p": 0.9}


class Asked:
    """One server and seed, with the chat's ids and text."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server, self.shared = server, {**SAMPLING, "seed": seed}
        asked = {**self.shared, "messages": SAID, "max_tokens": NUM_TOKENS}
        answer = self.whole("/v1/chat/completions", {**asked, "return_token_ids": True})
        (choice,) = answer["choices"]
        self.prompt: list[int] = answer["prompt_token_ids"]
        self.tokens: list[int] = choice["token_ids"]
        self.text: str = choice["message"]["content"]
        assert len(self.tokens) == NUM_TOKENS

    def whole(self, path: str, body: dict[str, Any]) -> Any:
        status, answer = self.server.post(path, body)
        assert status == 200, answer
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        with self.server.stream(path, {**body, "stream": True}) as stream:
            return [event for event in stream if event != "[DONE]"]

    def lines(self, path: str, body: dict[str, Any]) -> list[Any]:
        status, _, raw = self.server.request("POST", path, body)
        assert status == 200, raw
        return [json.loads(line) for line in raw.splitlines()]


@pytest.fixture(scope="module")
def drafting(tiny: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny, "--speculate", "ngram", "--threads", "1") as server:
        yield server


@pytest.fixture(params=[(seed, drafts) for seed in (11, 12) for drafts in (False, True)], ids=str)
def asked(request: pytest.FixtureRequest, server: RunningServer, drafting: RunningServer) -> Asked:
    seed, drafts = request.param
    return Asked(drafting if drafts else server, seed)


def chat_stream(asked: Asked) -> list[int]:
    body = {**asked.shared, "messages": SAID, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    events = asked.events("/v1/chat/completions", body)
    choices = [choice for event in events for choice in event["choices"]]
    return [id_ for choice in choices for id_ in choice.get("token_ids", ())]


def completions(asked: Asked) -> list[int]:
    body = {**asked.shared, "prompt": asked.prompt, "max_tokens": NUM_TOKENS}
    (choice,) = asked.whole("/v1/completions", {**body, "return_token_ids": True})["choices"]
    ids: list[int] = choice["token_ids"]
    return ids


def generate(asked: Asked) -> list[int]:
    body = {**asked.shared, "tokens": asked.prompt, "max_tokens": NUM_TOKENS}
    (choice,) = asked.whole("/generate", body)["choices"]
    ids: list[int] = choice["tokens"]
    return ids


def llama_cpp_completion(asked: Asked) -> list[int]:
    order = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # llama.cpp's differs
    body = {**asked.shared, "prompt": asked.prompt, "n_predict": NUM_TOKENS, "samplers": order}
    body["return_tokens"] = True
    answer = asked.whole("/completion", body)
    assert answer["content"] == asked.text
    ids: list[int] = answer["tokens"]
    return ids


def ollama_generate(asked: Asked) -> list[int]:
    options = {**asked.shared, "num_predict": NUM_TOKENS}
    body = {"system": SYSTEM, "prompt": USER, "options": options}
    context: list[int] = asked.lines("/api/generate", body)[-1]["context"]
    assert context[: len(asked.prompt)] == asked.prompt
    return context[len(asked.prompt) :]


@pytest.mark.parametrize(
    "ask", [chat_stream, completions, generate, llama_cpp_completion, ollama_generate]
)
def test_an_api_of_ids_has_the_ids_of_the_chat(
    ask: Callable[[Asked], list[int]], asked: Asked
) -> None:
    assert ask(asked) == asked.tokens


def messages(asked: Asked) -> str:
    body = {**asked.shared, "system": SYSTEM, "messages": SAID[1:], "max_tokens": NUM_TOKENS}
    text: str = asked.whole("/v1/messages", body)["content"][0]["text"]
    return text


def messages_stream(asked: Asked) -> str:
    body = {**asked.shared, "system": SYSTEM, "messages": SAID[1:], "max_tokens": NUM_TOKENS}
    deltas = [event.get("delta", {}) for event in asked.events("/v1/messages", body)]
    return "".join(delta.get("text", "") for delta in deltas)


def responses(asked: Asked) -> str:
    body = {**asked.shared, "instructions": SYSTEM, "input": USER, "max_output_tokens": NUM_TOKENS}
    text: str = asked.whole("/v1/responses", body)["output"][0]["content"][0]["text"]
    return text


def responses_stream(asked: Asked) -> str:
    body = {**asked.shared, "instructions": SYSTEM, "input": USER, "max_output_tokens": NUM_TOKENS}
    events = asked.events("/v1/responses", body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    return "".join(event["delta"] for event in deltas)


def ollama_chat(asked: Asked) -> str:
    body = {"messages": SAID, "options": {**asked.shared, "num_predict": NUM_TOKENS}}
    return "".join(line["message"]["content"] for line in asked.lines("/api/chat", body))


@pytest.mark.parametrize(
    "ask", [messages, messages_stream, responses, responses_stream, ollama_chat]
)
def test_an_api_of_texts_has_the_text_of_the_chat(
    ask: Callable[[Asked], str], asked: Asked
) -> None:
    assert ask(asked) == asked.text


def test_grpc_has_the_ids_of_the_chat(tiny: Path) -> None:
    """quire.v1.Generation and KServe v2, from the chat's prompt."""
    pytest.importorskip("grpc")
    from tests.serve.test_grpc import Client, grpc, infer_request, messages, port_of

    with RunningServer(tiny, "--grpc-port", "0", "--threads", "1") as server:
        asked = Asked(server, 11)
        with grpc.insecure_channel(f"127.0.0.1:{port_of(server)}") as channel:
            client = Client(channel)
            fields = {"ignore_eos": True}
            *parts, _ = client.generate(
                token_ids=messages.quire_v1.TokenIds(ids=asked.prompt),
                max_tokens=NUM_TOKENS,
                seed=11,
                temperature=0.75,
                top_p=0.9,
                fields_json=json.dumps(fields),
            )
            assert [id_ for part in parts for id_ in part.token_ids] == asked.tokens
            request = infer_request(**asked.shared, max_tokens=NUM_TOKENS)
            request.model_name = server.get("/v1/models")[1]["data"][0]["id"]
            tensor = request.inputs.add(
                name="input_ids", datatype="INT32", shape=[len(asked.prompt)]
            )
            tensor.contents.int_contents.extend(asked.prompt)
            answer = client.infer(request)
            outputs = {output.name: output for output in answer.outputs}
            assert list(outputs["output_ids"].contents.int_contents) == asked.tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/messages", {"system": SYSTEM, "messages": SAID[1:]}),
        ("/v1/messages", {"system": [_part(SYSTEM)], "messages": [_said("user", [_part(USER)])]}),
        ("/v1/responses", {"instructions": SYSTEM, "input": USER}),
        (
            "/v1/responses",
            {"input": [_said("developer", SYSTEM), _said("user", [_part(USER, "input_text")])]},
        ),
        ("/api/chat", {"messages": SAID}),
        ("/api/generate", {"system": SYSTEM, "prompt": USER}),
    ],
)
def test_a_router_learns_the_ids_of_each_api_from_tokenize(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    asked = Asked(server, seed=11)
    fields = tokenize_fields(path, body)
    assert fields is not None
    assert asked.whole("/tokenize", fields)["tokens"] == asked.prompt


def test_a_router_learns_the_ids_of_a_raw_prompt(server: RunningServer) -> None:
    asked = Asked(server, seed=11)
    known = asked.whole("/tokenize", {"prompt": USER})["tokens"]
    for path, body in (
        ("/completion", {"prompt": USER}),
        ("/api/generate", {"prompt": USER, "raw": True}),
    ):
        fields = tokenize_fields(path, body)
        assert fields is not None
        assert asked.whole("/tokenize", fields)["tokens"] == known
    whole = {**asked.shared, "prompt": USER, "n_predict": 1}
    assert asked.whole("/completion", whole)["tokens_evaluated"] == len(known)
    raw = {"prompt": USER, "raw": True, "options": {"num_predict": 1}}
    assert asked.lines("/api/generate", raw)[-1]["prompt_eval_count"] == len(known)
