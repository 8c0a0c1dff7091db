"""Streams of other APIs than OpenAI's chats and completions: continued like those, or why not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.router.event_blocks import EventBlocks
from quire.router.routed_request import RoutedRequest
from quire.router.routes import ROUTES
from tests.cases import each_case
from tests.unit.router.fake_replica import LENGTH, FakeReplica, Router, run
from tests.unit.router.test_responses import KEY, Storing

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {**CHAT, "max_tokens": 50},
    "/v1/responses": {"input": "a"},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "a", "options": {"num_predict": 50}},
    "/completion": {"prompt": "a"},
    "/infill": {"input_prefix": "a"},
}


def _replicas(path: str, num: int = 2) -> list[FakeReplica]:
    replicas = [FakeReplica() for _ in range(num)]
    for one in replicas:
        one.event_end = b"\n" if path.startswith("/api/") else b"\n\n"
    return replicas


def _tokens(events: bytes) -> list[int]:
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n")]
    return [json.loads(line)["token"] for line in lines if line.startswith(b'{"token"')]


@pytest.mark.parametrize("path", BODIES)
def test_a_cut_stream_of_any_api_continues_elsewhere(path: str) -> None:
    first, second = _replicas(path)
    first.fails_after, first.seed = 4, 77

    async def story(router: Router) -> bytes:
        status, _, body = await router.post(path, {**BODIES[path], "stream": True})
        assert status == 200
        assert router.count("quire_router_resumed_streams_total") == 1
        return body

    body = run([first, second], story)
    assert _tokens(body) == list(range(100, 100 + LENGTH))
    assert body.endswith(b"[DONE]" + first.event_end)
    assert b"output_ids" not in body
    asked, again = first.requests[0], second.requests[0]
    assert asked["include_output_ids"] is again["include_output_ids"] is True
    assert "stream_options" not in again
    assert again["output_ids"] == [100, 101, 102, 103]
    assert again["output_cursor"].endswith(":4:0")
    sampling = again["options"] if path.startswith("/api/") else again
    assert sampling["seed"] == 77, "what the first replica has used"
    if path == "/api/generate":
        assert sampling["num_predict"] == 50


def test_each_route_that_generates_is_continued() -> None:
    generating = {path for path, route in ROUTES.items() if route.generates}
    assert generating == {*BODIES, "/v1/chat/completions", "/v1/completions", "/generate"}
    for path in generating:
        assert not RoutedRequest(path, [], b'{"stream":true}').why_not


@each_case(
    ("path", "fields", "why"),
    [
        ("/v1/messages", {"mirostat": 2}, "mirostat"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"]}, ""),
        ("/api/chat", {"options": {"mirostat": 1}}, "mirostat"),
        ("/api/chat", {"options": 7}, "options"),
        ("/api/chat", {"options": None}, ""),
        ("/completion", {"n_indent": 2}, "n_indent"),
        ("/completion", {"t_max_predict_ms": 20}, "t_max_predict_ms"),
        ("/completion", {"n_cmpl": 2}, "n_cmpl"),
        ("/completion", {"prompt": ["a", "b"]}, "2 prompts"),
        ("/completion", {"prompt": ["a", 5, 6]}, ""),
    ],
)
def test_what_cannot_be_continued_is_asked_for_as_it_was(
    path: str, fields: dict[str, Any], why: str
) -> None:
    body = {**BODIES[path], "stream": True, **fields}
    request = RoutedRequest(path, [], json.dumps(body).encode())
    assert bool(request.why_not) == bool(why)
    assert why in request.why_not
    assert ("include_output_ids" in json.loads(request.body())) == (not why)


@pytest.mark.parametrize("path", BODIES)
def test_a_replica_that_would_answer_otherwise_ends_the_stream_with_an_error(path: str) -> None:
    """Its prompt or text has another digest than the cursor has: it refuses the request."""
    first, second = _replicas(path)
    first.fails_after = 4

    def refuse(method: str, path: str, fields: dict[str, Any]) -> tuple[int, bytes] | None:
        assert "output_cursor" in fields
        return 400, b'{"error":{"message":"its digest differs","param":"output_cursor"}}'

    second.answer = refuse

    async def story(router: Router) -> bytes:
        return (await router.post(path, {**BODIES[path], "stream": True}))[2]

    body = run([first, second], story)
    assert _tokens(body) == [100, 101, 102, 103]
    last = body.rstrip(b"\n").split(b"\n")[-1].removeprefix(b"data: ")
    assert b"the stream cannot go on: its digest differs" in last
    assert "error" in json.loads(last) or json.loads(last)["type"] == "error"


@pytest.mark.parametrize("path", BODIES)
def test_an_error_is_known_by_the_code_in_its_comment(path: str) -> None:
    first, second = _replicas(path)
    event = b'{"error":"it ends"}' + first.event_end
    first.fails_after = 5
    first.says = event + b': {"ended":"shutting_down"}' + first.event_end
    body = {**BODIES[path], "stream": True}

    async def story(router: Router) -> None:
        assert _tokens((await router.post(path, body))[2]) == list(range(100, 100 + LENGTH))
        first.says = first.says.replace(b"shutting_down", b"no_token_to_choose")
        second.fails_after, second.says = 5, first.says
        passed_on = (await router.post(path, body))[2]
        assert _tokens(passed_on) == list(range(100, 105))
        assert passed_on.endswith(event)

    run([first, second], story)


def test_a_response_is_found_at_the_replica_that_has_ended_it() -> None:
    first, second = Storing("a"), Storing("b")
    first.fails_after = 4
    id_ = f"resp_{'a' * 24}"
    for one in (first, second):
        one.answer_id = id_

    async def story(router: Router) -> None:
        await router.post("/v1/responses", {"input": "a", "stream": True}, headers=KEY)
        second.made.append(id_)
        asked = len(first.asked)
        status, _, _ = await router.post(f"/v1/responses/{id_}", None, headers=KEY)
        assert status == 200
        assert len(first.asked) == asked

    run([first, second], story)


def test_a_request_without_a_prompt_gets_its_one_object() -> None:
    """Ollama's clients load a model so; `stream` is true unless they say otherwise."""
    (only,) = _replicas("/api/chat", 1)
    only.answer = lambda method, path, fields: (200, b'{"done":true,"done_reason":"load"}')

    async def story(router: Router) -> None:
        status, _, body = await router.post("/api/chat", {"model": "box"})
        assert (status, body) == (200, b'{"done":true,"done_reason":"load"}')

    run([only], story)


def test_heartbeats_of_any_api_are_passed_on_between_deltas() -> None:
    for beat in (b": waiting", b":", b'event: ping\ndata: {"type":"ping"}'):
        blocks = EventBlocks()
        assert [one.blocks for one in blocks.push(beat + b"\n\n")] == [beat + b"\n\n"]
        assert blocks.push(b"data: {}\n\n" + beat + b"\n\n") == [], "within a delta it is left out"
        comment = b': {"output_ids":[1],"output_cursor":"g:1:1:0"}\n\n'
        assert [one.blocks for one in blocks.push(comment)] == [b"data: {}\n\n"]
