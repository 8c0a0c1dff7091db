"""One conversation has the same token ids through each API that can express it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.running_server import RunningServer

SYSTEM, USER = "a stone by the river", "the sea and the stone"
SAID = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
NUM_TOKENS = 24
SHARED: dict[str, Any] = {"seed": 11, "ignore_eos": True, "temperature": 0.75, "top_p": 0.9}


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


@pytest.fixture
def chat(server: RunningServer) -> dict[str, Any]:
    """Return the ids and the text of the chat."""
    asked = {**SHARED, "messages": SAID, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    answer = whole(server, "/v1/chat/completions", asked)
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == NUM_TOKENS
    return {
        "prompt": answer["prompt_token_ids"],
        "tokens": choice["token_ids"],
        "text": choice["message"]["content"],
    }


def of_messages(server: RunningServer) -> str:
    asked = {**SHARED, "system": SYSTEM, "messages": SAID[1:], "max_tokens": NUM_TOKENS}
    text: str = whole(server, "/v1/messages", asked)["content"][0]["text"]
    return text


def of_responses(server: RunningServer) -> str:
    asked = {**SHARED, "instructions": SYSTEM, "input": USER, "max_output_tokens": NUM_TOKENS}
    text: str = whole(server, "/v1/responses", asked)["output"][0]["content"][0]["text"]
    return text


def of_ollama_chat(server: RunningServer) -> str:
    asked = {"messages": SAID, "stream": False, "options": {**SHARED, "num_predict": NUM_TOKENS}}
    text: str = whole(server, "/api/chat", asked)["message"]["content"]
    return text


@pytest.mark.parametrize("ask", [of_messages, of_responses, of_ollama_chat])
def test_an_api_of_texts_has_the_text_of_the_chat(
    ask: Callable[[RunningServer], str], server: RunningServer, chat: dict[str, Any]
) -> None:
    assert ask(server) == chat["text"]


def test_an_api_of_ids_has_the_ids_of_the_chat(server: RunningServer, chat: dict[str, Any]) -> None:
    asked = {**SHARED, "tokens": chat["prompt"], "max_tokens": NUM_TOKENS}
    (choice,) = whole(server, "/generate", asked)["choices"]
    assert choice["tokens"] == chat["tokens"]
    asked = {**SHARED, "prompt": chat["prompt"], "n_predict": NUM_TOKENS, "return_tokens": True}
    answer = whole(server, "/completion", asked)
    assert (answer["tokens"], answer["content"]) == (chat["tokens"], chat["text"])
    options = {**SHARED, "num_predict": NUM_TOKENS}
    completion = {"system": SYSTEM, "prompt": USER, "options": options}
    _, _, raw = server.request("POST", "/api/generate", json.dumps(completion).encode())
    context = json.loads(raw.splitlines()[-1])["context"]
    assert context == [*chat["prompt"], *chat["tokens"]]
