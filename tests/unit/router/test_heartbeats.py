"""Heartbeats of a stream that cannot be continued: no output, and no progress of its replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.router.answer_state import AnswerState
from quire.router.event_blocks import is_heartbeat
from tests.unit.router.fake_replica import FakeReplica, Router, _chunk, run

HEARTBEAT = b": heartbeat\n\n"
EVENT = b'data: {"token": 100}\n\n'
NOT_CONTINUABLE: dict[str, Any] = {"tokens": [1], "stream": True, "prompt_logprobs": 0}


class Heartbeating(FakeReplica):
    """Sends heartbeats until its gate opens, then an event. first_event: before them."""

    first_event = b""

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
        _chunk(writer, EVENT)
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
