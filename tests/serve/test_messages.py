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
    assert block["text"] == chat["choices"][0]["message"]["content"]
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


def test_a_marked_prefix_is_pinned_and_counted_once(server: RunningServer) -> None:
    system = [{"type": "text", "text": "a river by the stone " * 12, "cache_control": EPHEMERAL}]
    asked = {**ASKED, "system": system, "seed": 9}
    status, first = server.post(MESSAGES, asked)
    assert status == 200, first
    usage = first["usage"]
    made = usage["cache_creation_input_tokens"]
    assert made > 100
    assert made % BLOCK == 0
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": made,
        "ephemeral_1h_input_tokens": 0,
    }
    again = server.post(MESSAGES, asked)[1]
    assert again["usage"]["cache_creation_input_tokens"] == 0
    assert again["usage"]["cache_read_input_tokens"] >= made
    assert again["content"] == first["content"]
    assert sum(first["usage"][name] for name in INPUTS) == sum(
        again["usage"][name] for name in INPUTS
    )
    server.until(lambda: server.metric("quire_pinned_blocks") >= made // BLOCK, "it is pinned")
    assert server.metric("quire_pinned_tokens_total") >= made


def test_a_stop_pattern_ends_the_same_answer_through_every_route(server: RunningServer) -> None:
    fields = {"stop_regex": ["[aeiou][a-z]"], "seed": 4}
    whole = server.post(CHAT, {**ASKED, "seed": 4})[1]["choices"][0]["message"]["content"]
    choice = server.post(CHAT, {**ASKED, **fields})[1]["choices"][0]
    text = choice["message"]["content"]
    assert whole.startswith(text)
    if choice["finish_reason"] == "stop":
        assert choice["stop_reason"] == "[aeiou][a-z]"
        assert text[-2] in "aeiou"
    message = server.post(MESSAGES, {**ASKED, **fields})[1]
    assert "".join(block["text"] for block in message["content"]) == text
    _, _, raw = server.request(
        "POST", CHAT, json.dumps({**ASKED, **fields, "stream": True}).encode()
    )
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line[:7] == "data: {"]
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(parts) == text
    status, refused = server.post(CHAT, {**ASKED, "stop_regex": "(a"})
    assert (status, refused["error"]["param"]) == (400, "stop_regex")
