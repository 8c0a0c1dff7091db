"""Heartbeats of a stream that cannot be continued: no output, and no progress of its replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.router.answer_state import AnswerState
from quire.router.event_blocks import is_heartbeat
from tests.unit.router.fake_replica import FakeReplica, Router, _chunk, run
from tests.unit.router.test_failover import ERROR_EVENT
from tests.unit.router.test_responses import KEY, Storing

HEARTBEAT = b": heartbeat\n\n"
EVENT = b'data: {"token": 100}\n\n'
NOT_CONTINUABLE: dict[str, Any] = {"tokens": [1], "stream": True, "prompt_logprobs": 0}


class Heartbeating(FakeReplica):
    """Sends heartbeats until its gate opens, then `event`. first_event: before them."""

    first_event, event = b"", EVENT

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        assert self.gate is not None
        if self.first_event:
            _chunk(writer, self.first_event)
        while not self.gate.is_set():
            _chunk(writer, HEARTBEAT)
            await writer.drain()
            await asyncio.sleep(0.1)
        _chunk(writer, self.event)
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")
        return True


def test_a_heartbeat_gives_back_no_place_to_move_and_ends_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list[str]()
    monkeypatch.setattr(AnswerState, "leave_place", lambda self: left.append("left"))
    only = Heartbeating()
    only.gate = asyncio.Event()

    async def story(router: Router) -> None:
        got = list[bytes]()
        asked = router.post("/generate", NOT_CONTINUABLE, on_piece=got.append)
        asking = asyncio.ensure_future(asked)
        while len(got) < 3:
            await asyncio.sleep(0.01)
        [load] = router.fleet.replicas[only.url].loads
        assert (left, load.is_new) == ([], True)
        assert only.gate is not None
        only.gate.set()
        await asyncio.sleep(0.15)
        assert (await asking)[2].endswith(EVENT + b"data: [DONE]\n\n")
        assert left
        assert not load.is_new

    run([only], story)


@pytest.mark.parametrize("has_event", [False, True])
def test_a_stream_with_heartbeats_alone_begins_anew_at_another_replica(has_event: bool) -> None:
    first, second = Heartbeating(), FakeReplica()
    first.gate = asyncio.Event()
    second.prompt_tokens = 1

    async def story(router: Router) -> None:
        got = list[bytes]()
        first.first_event = EVENT if has_event else b""
        asked = router.post("/generate", NOT_CONTINUABLE, on_piece=got.append)
        asking = asyncio.ensure_future(asked)
        while len(got) < 3:
            await asyncio.sleep(0.01)
        first.stop_listening(cuts=True)
        status, _, body = await asking
        assert status == 200
        if has_event:
            assert b"cannot be continued exactly: it has prompt_logprobs" in body
            assert router.count("quire_router_broken_streams_total") == 1
            return
        assert body.startswith(HEARTBEAT)
        assert body.replace(HEARTBEAT, b"").startswith(b'data: {"token": 100}\n\n')
        assert body.count(b"data: [DONE]") == 1
        assert second.requests == first.requests, "the whole request once more"
        assert router.count("quire_router_resumed_streams_total") == 1
        assert router.count("quire_router_resume_seconds_count") == 1

    run([first, second], story)


@pytest.mark.parametrize("body", [NOT_CONTINUABLE, {"tokens": [1], "stream": True}])
def test_a_stream_that_begins_anew_needs_no_replica_of_the_same_fingerprint(
    body: dict[str, Any],
) -> None:
    """As while a fleet is upgraded. Once it has an event, it does need one."""
    first, second, third = Heartbeating("fp_a"), FakeReplica("fp_b"), FakeReplica("fp_a")
    first.gate = asyncio.Event()
    second.prompt_tokens = 1
    second.health |= {"ok": False, "state": "starting"}
    third.health |= {"ok": False, "state": "starting"}

    async def story(router: Router) -> None:
        got = list[bytes]()
        asking = asyncio.ensure_future(router.post("/generate", body, on_piece=got.append))
        while len(got) < 3:
            await asyncio.sleep(0.01)
        first.stop_listening(cuts=True)
        await asyncio.sleep(1.0)
        second.fails_after = 4
        second.before_token = lambda count: second.stop_listening(cuts=count == 4)
        second.health |= {"ok": True, "state": "ready"}
        while not second.requests:
            await asyncio.sleep(0.01)
        third.health |= {"ok": True, "state": "ready"}
        status, _, answer = await asking
        assert status == 200
        assert answer.replace(HEARTBEAT, b"").count(b"\n\n") >= 4
        assert b"stream_broken" in answer
        assert (b"prompt_logprobs" in answer) == (body is NOT_CONTINUABLE)
        assert not third.requests

    run([first, second, third], story, resume_s=3.0)


@pytest.mark.parametrize("code", ["queue_timeout", "shutting_down", "worker_error", "timeout"])
@pytest.mark.parametrize("comes_alone", [False, True])
def test_an_error_before_the_first_event_is_as_one_before_the_stream(
    code: str, comes_alone: bool
) -> None:
    """One that another replica would have as well is passed on."""
    first, second = Heartbeating(), FakeReplica()
    gate = first.gate = asyncio.Event()
    error = ERROR_EVENT % code.encode()
    is_own = code == "timeout"

    async def story(router: Router) -> None:
        first.first_event = b"" if comes_alone else HEARTBEAT + error
        first.event = error
        asyncio.get_running_loop().call_later(0.15, gate.set)
        body = (await router.post("/generate", NOT_CONTINUABLE))[2].replace(HEARTBEAT, b"")
        assert body.startswith(error if is_own else EVENT)
        assert (error in body) == is_own

    run([first, second], story)
    assert bool(second.requests) == (not is_own)


class HeartbeatingStore(Heartbeating, Storing):
    """Likewise, and stores responses."""


def test_a_stream_that_needs_a_stored_response_ends_with_the_replica_that_has_it() -> None:
    first, second = HeartbeatingStore("a"), Storing("b")
    first.gate = asyncio.Event()
    first.made.append("resp_" + "a" * 24)
    body = {"input": "a", "stream": True, "previous_response_id": first.made[0]}
    body["include"] = ["message.output_text.logprobs"]

    async def story(router: Router) -> None:
        got = list[bytes]()
        asked = router.post("/v1/responses", body, headers=KEY, on_piece=got.append)
        asking = asyncio.ensure_future(asked)
        while len(got) < 3:
            await asyncio.sleep(0.01)
        first.stop_listening(cuts=True)
        answer = (await asking)[2]
        assert b"stream_broken" in answer
        assert b"cannot be continued exactly" in answer
        assert ("POST", "/v1/responses") not in second.asked

    run([first, second], story)


def test_a_replica_that_only_sends_heartbeats_is_stalled() -> None:
    """They come from its event loop while its engine hangs."""
    only = Heartbeating()
    only.gate = asyncio.Event()

    async def story(router: Router) -> None:
        only.health["pending"] = 1
        body = {"tokens": [1], "stream": True, "prompt_logprobs": 0}
        await router.post("/generate", body)
        assert router.fleet.replicas[only.url].state == "stalled"

    run([only], story, stall_s=1.0)


@pytest.mark.parametrize(
    ("received", "end", "found"),
    [
        (b": one\n\n: two\n\n", b"\n\n", True),
        (b"event: ping\ndata: {}\n\n", b"\n\n", True),
        (b": one\n\ndata: 1\n\n", b"\n\n", False),
        (b": one\n\nda", b"\n\n", False),
        (b'{"done": false}\n', b"\n", False),
    ],
)
def test_what_a_heartbeat_is(received: bytes, end: bytes, found: bool) -> None:
    assert is_heartbeat(received, end) == found
