"""Ollama's API over real sockets: the tokens of the same request of OpenAI's, hostile bodies."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.running_server import RunningServer
from tests.serve.test_bad_input import RAW_CASES

SAID = [{"role": "user", "content": "the sea and the stone"}]
OPTIONS = {"num_predict": 24, "seed": 4, "ignore_eos": True}


def lines_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    status, _, raw = server.request("POST", path, json.dumps(body).encode())
    assert status == 200, raw
    return [json.loads(line) for line in raw.splitlines()]


def test_a_chat_has_the_tokens_of_the_same_chat_of_openai(server: RunningServer) -> None:
    asked: dict[str, Any] = {"messages": SAID, "max_tokens": 24, "seed": 4, "ignore_eos": True}
    status, chat = server.post("/v1/chat/completions", asked)
    assert status == 200, chat
    *lines, last = lines_of(server, "/api/chat", {"messages": SAID, "options": OPTIONS})
    text = "".join(line["message"]["content"] for line in lines)
    assert text == chat["choices"][0]["message"]["content"]
    assert (last["eval_count"], last["done_reason"]) == (24, "length")
    assert last["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert last["total_duration"] >= last["eval_duration"] > 0
    whole = {"messages": SAID, "options": OPTIONS, "stream": False}
    assert server.post("/api/chat", whole)[1]["message"]["content"] == text


def test_old_messages_are_left_out_and_the_model_is_counted(server: RunningServer) -> None:
    card = server.get("/v1/models")[1]["data"][0]
    text = "Tom has a dog. " * (card["max_model_len"] // 4)  # more than the context has
    turn = [{"role": role, "content": text} for role in ("user", "assistant")]
    sent = {"messages": [*turn, *SAID], "stream": False, "options": {"num_predict": 4}}
    status, answer = server.post("/api/chat", {**sent, "truncate": False})
    assert (status, "maximum context length" in answer["error"]) == (400, True)
    status, answer = server.post("/api/chat", {**sent, "model": f"{card['id']}:latest"})
    assert status == 200, answer
    assert 0 < answer["prompt_eval_count"] < 100, "both old ones are left out"
    _, shown = server.post("/api/show", {"model": card["id"]})
    number = shown["model_info"]["general.parameter_count"]
    assert number * 2 <= server.get("/api/tags")[1]["models"][0]["size"] <= number * 4 + 100_000


def test_a_raw_prompt_has_the_tokens_of_the_same_completion(server: RunningServer) -> None:
    asked = {"prompt": "the sea", "max_tokens": 24, "seed": 4, "ignore_eos": True}
    status, completion = server.post("/v1/completions", {**asked, "return_token_ids": True})
    assert status == 200, completion
    (choice,) = completion["choices"]
    raw = {"prompt": "the sea", "raw": True, "options": OPTIONS}
    *lines, last = lines_of(server, "/api/generate", raw)
    assert "".join(line["response"] for line in lines) == choice["text"]
    assert last["eval_count"] == 24
    status, _, answer = server.request(
        "POST", "/api/generate", json.dumps({"prompt": "the sea", "options": OPTIONS}).encode()
    )
    context = json.loads(answer.splitlines()[-1])["context"]
    status, ids = server.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "the sea"}],
            "max_tokens": 24,
            "seed": 4,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert context == [*ids["prompt_token_ids"], *ids["choices"][0]["token_ids"]]


def test_unreadable_bodies_disturb_no_other_request(
    beside_a_healthy_stream: RunningServer,
) -> None:
    for path in ("/api/chat", "/api/generate", "/api/show"):
        for case, (raw, status, words) in RAW_CASES.items():
            found, _, answer = beside_a_healthy_stream.request("POST", path, raw)
            assert found == status, (case, answer)
            said = json.loads(answer)
            assert said.keys() == {"error"}, case
            is_read = path != "/api/generate" and '"prompt"' in said["error"]
            assert words in said["error"] or is_read, (case, said)
