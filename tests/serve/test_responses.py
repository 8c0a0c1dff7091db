"""POST /v1/responses over real sockets: the tokens of the same chat, and hostile bodies."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.running_server import RunningServer
from tests.serve.test_bad_input import RAW_CASES

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
SAID = [{"role": "user", "content": "the sea and the stone"}]
BOTH: dict[str, Any] = {"seed": 4, "ignore_eos": True}
ASKED: dict[str, Any] = {**BOTH, "input": SAID, "max_output_tokens": 24}


def streamed(server: RunningServer, method: str, path: str, body: Any = None) -> list[Any]:
    """Return the events of a stream."""
    raw = b"" if body is None else json.dumps(body).encode()
    status, _, text = server.request(method, path, raw)
    assert status == 200, text
    return [json.loads(line[6:]) for line in text.decode().split("\n") if line[:6] == "data: "]


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_response_has_the_text_and_the_prompt_of_the_same_chat(server: RunningServer) -> None:
    status, chat = server.post(CHAT, {**BOTH, "messages": SAID, "max_tokens": 24})
    assert status == 200, chat
    status, response = server.post(RESPONSES, ASKED)
    assert status == 200, response
    assert text_of(response) == chat["choices"][0]["message"]["content"]
    assert response["status"] == "incomplete"
    usage = response["usage"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 24
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    events = streamed(server, "POST", RESPONSES, {**ASKED, "stream": True})
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(events[-1]["response"]) == text_of(response)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    again = {**BOTH, "input": "the stone", "previous_response_id": response["id"]}
    status, second = server.post(RESPONSES, {**again, "max_output_tokens": 4})
    assert status == 200, second
    said = [*SAID, {"role": "assistant", "content": text_of(response)}]
    said.append({"role": "user", "content": "the stone"})
    _, chat = server.post(CHAT, {**BOTH, "messages": said, "max_tokens": 4})
    assert text_of(second) == chat["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_background_response_ends_without_its_client(server: RunningServer) -> None:
    status, queued = server.post(RESPONSES, {**ASKED, "background": True})
    assert (status, queued["status"]) == (200, "queued")
    path = f"{RESPONSES}/{queued['id']}"
    events = streamed(server, "GET", f"{path}?stream=true&starting_after=1")
    assert events[0]["sequence_number"] == 2
    response = events[-1]["response"]
    assert server.get(path) == (200, response)
    assert text_of(response) == text_of(server.post(RESPONSES, ASKED)[1])
    assert server.post(f"{path}/cancel", {}) == (200, response)
    status, _, _ = server.request("DELETE", path, b"")
    assert (status, server.get(path)[0]) == (200, 404)


def test_unreadable_bodies_disturb_no_other_request(
    beside_a_healthy_stream: RunningServer,
) -> None:
    for case, (raw, status, _) in RAW_CASES.items():
        found, _, answer = beside_a_healthy_stream.request("POST", RESPONSES, raw)
        assert found == status, (case, answer)
        assert json.loads(answer)["error"]["type"] == "invalid_request_error", case
