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


class Heartbeating(FakeReplica):
    """Sends heartbeats until its gate opens, then an event."""

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        assert self.gate is not None
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
        body = {"tokens": [1], "stream": True, "prompt_logprobs": 0}
        asking = asyncio.ensure_future(router.post("/generate", body, on_piece=got.append))
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
