"""POST /v1/messages over real sockets: the tokens of the same chat, and hostile bodies."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.running_server import RunningServer
from tests.serve.test_bad_input import RAW_CASES

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
SAID = [{"role": "user", "content": "the sea and the stone"}]
EPHEMERAL = {"type": "ephemeral"}
INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
BLOCK = 16  # tokens
ASKED: dict[str, Any] = {"messages": SAID, "max_tokens": 24, "seed": 4, "ignore_eos": True}


def test_a_message_has_the_text_and_the_prompt_of_the_same_chat(server: RunningServer) -> None:
    status, chat = server.post(CHAT, ASKED)
    assert status == 200, chat
    status, message = server.post(MESSAGES, ASKED)
    assert status == 200, message
    (block,) = message["content"]
    assert block == {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    usage = message["usage"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 24
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt_tokens == chat["usage"]["prompt_tokens"]
    assert message["stop_reason"] == "max_tokens"
    assert server.post(f"{MESSAGES}/count_tokens", {"messages": SAID}) == (
        200,
        {"input_tokens": prompt_tokens},
    )
    _, _, raw = server.request("POST", MESSAGES, json.dumps({**ASKED, "stream": True}).encode())
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line[:6] == "data: "]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == block["text"]
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]


def test_a_second_turn_reads_the_first_from_the_cache(server: RunningServer) -> None:
    system = [{"type": "text", "text": "a stone by the river " * 12, "cache_control": EPHEMERAL}]
    asked = {**ASKED, "system": system, "seed": 9}
    first = server.post(MESSAGES, asked)[1]
    said = [*SAID, {"role": "assistant", "content": first["content"]}, *SAID]
    second = server.post(MESSAGES, {**asked, "messages": said})[1]
    num_first = sum(first["usage"][name] for name in INPUTS)
    assert num_first > 100
    read = second["usage"]["cache_read_input_tokens"]
    assert num_first - BLOCK < read < sum(second["usage"][name] for name in INPUTS)


def test_unreadable_bodies_disturb_no_other_request(
    beside_a_healthy_stream: RunningServer,
) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        for case, (raw, status, _) in RAW_CASES.items():
            found, _, answer = beside_a_healthy_stream.request("POST", path, raw)
            assert found == status, (case, answer)
            said = json.loads(answer)
            kind = "request_too_large" if status == 413 else "invalid_request_error"
            assert (said["type"], said["error"]["type"]) == ("error", kind), case
