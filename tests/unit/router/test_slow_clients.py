"""Clients that read slowly: that servers give up their connections is no failure of a replica."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from tests.unit.router.fake_replica import FakeReplica, Router, _chunk, run

NUM_EVENTS, PAD = 40, "x" * 65536
# After which a replica gives up a reader, and how long the client reads nothing.
GIVEN_UP_S, PAUSE_S = 0.3, 2.0


def event(token: int) -> bytes:
    return b'data: {"token": %d, "pad": "%b"}\n\n' % (token, PAD.encode())


class Impatient(FakeReplica):
    """Sends large events, and closes a connection from which nothing is read. num_given_up: of
    these."""

    num_given_up = 0

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        known = len(request.get("output_ids", []))
        for token in range(known, NUM_EVENTS):
            cursor = f"{self.answer_id}:1:{token + 1}:0"
            comment = json.dumps({"output_ids": [token], "output_cursor": cursor})
            comment = comment.replace(": ", ":").replace(", ", ",")
            _chunk(writer, event(token) + b": %b\n\n" % comment.encode())
            try:
                async with asyncio.timeout(GIVEN_UP_S):
                    await writer.drain()
            except TimeoutError:
                self.num_given_up += 1
                writer.transport.abort()
                return False
        _chunk(writer, b'data: [DONE]\n\n: {"ended":null}\n\n')
        _chunk(writer, b"")
        return True


def test_a_stream_that_a_replica_gives_up_for_its_slow_client_is_no_failure_of_it() -> None:
    first, second = replicas = [Impatient(), Impatient()]

    async def story(router: Router) -> None:
        loop = asyncio.get_running_loop()
        reads = asyncio.Event()
        loop.call_later(PAUSE_S, reads.set)
        status, _, body = await router.post(
            "/generate", {"tokens": [1], "stream": True}, on_piece=lambda piece: reads.wait()
        )
        assert status == 200
        assert body == b"".join(map(event, range(NUM_EVENTS))) + b"data: [DONE]\n\n"
        assert not any("fenced" in line for line in router.lines)
        for replica in router.fleet.replicas.values():
            assert replica.breaker._num_failures == 0
            assert replica.is_available(loop.time())

    run(replicas, story, stall_s=5.0)
    assert first.num_given_up == 1
    assert second.requests
