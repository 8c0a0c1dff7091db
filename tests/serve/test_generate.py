"""/generate over real sockets returns the token ids of a completion, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.running_server import RunningServer

ASKED = {"tokens": [5, 9, 11], "seed": 3, "max_tokens": 24, "ignore_eos": True, "n": 2}


def test_streamed_and_whole_ids_equal_those_of_a_completion(server: RunningServer) -> None:
    status, whole = server.post("/generate", {**ASKED, "logprobs": 2})
    assert status == 200
    ids = [choice["tokens"] for choice in whole["choices"]]
    assert [len(tokens) for tokens in ids] == [24, 24]
    assert whole["usage"]["completion_tokens"] == 48
    for choice in whole["choices"]:
        assert len(choice["logprobs"]) == len(choice["top_logprobs"]) == 24
        assert all(len(top) >= 2 for top in choice["top_logprobs"])
    fields = {name: value for name, value in ASKED.items() if name != "tokens"}
    completion = server.post("/v1/completions", {**fields, "prompt": ASKED["tokens"]})[1]
    texts = [
        server.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True})[1]["prompt"]
        for tokens in ids
    ]
    assert [choice["text"] for choice in completion["choices"]] == texts
    streamed: dict[int, list[int]] = {0: [], 1: []}
    with server.stream("/generate", ASKED) as reader:
        *chunks, done = list(reader)
    assert done == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["tokens"]
    assert [streamed[0], streamed[1]] == ids


def test_ids_returned_with_texts_equal_those_of_generate(server: RunningServer) -> None:
    fields = {name: value for name, value in ASKED.items() if name != "tokens"}
    made = [choice["tokens"] for choice in server.post("/generate", ASKED)[1]["choices"]]
    asked = {**fields, "prompt": ASKED["tokens"], "return_token_ids": True}
    whole = server.post("/v1/completions", asked)[1]
    assert [choice["token_ids"] for choice in whole["choices"]] == made
    assert all(choice["prompt_token_ids"] == ASKED["tokens"] for choice in whole["choices"])
    streamed: dict[int, list[int]] = {0: [], 1: []}
    with server.stream("/v1/completions", asked) as reader:
        for chunk in [*reader][:-1]:
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
    assert [streamed[0], streamed[1]] == made


def test_a_prompt_of_ids_is_scored_as_in_a_completion(server: RunningServer) -> None:
    scored = {"prompt_logprobs": 2, "max_tokens": 0}
    tokens = ASKED["tokens"]
    scores = server.post("/generate", {**scored, "tokens": tokens})[1]["prompt_logprobs"]
    completion = server.post("/v1/completions", {**scored, "prompt": tokens})[1]
    assert scores == completion["choices"][0]["prompt_logprobs"]
    last = server.post("/generate", {**scored, "tokens": tokens, "truncate_prompt_tokens": 2})[1]
    assert len(scores) == 3
    assert len(last["prompt_logprobs"]) == last["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokens": "text"}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, -1]}, "tokens"),
        ({"tokens": [1, True]}, "tokens"),
        ({"tokens": [1.0]}, "tokens"),
        ({}, "tokens"),
        ({"prompt": "a"}, "prompt"),
        ({"tokens": [1], "temperature": float("inf")}, "temperature"),
        ({"tokens": [1], "n": 10**9}, "n"),
    ],
)
def test_invalid_fields_are_rejected_by_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    if "temperature" in fields:
        status, _, raw = server.request(
            "POST", "/generate", b'{"tokens": [1], "temperature": 1e999}'
        )
        assert (status, f'"param":"{param}"'.encode() in raw) == (400, True)
        return
    status, body = server.post("/generate", fields)
    assert (status, body["error"]["param"]) == (400, param)
