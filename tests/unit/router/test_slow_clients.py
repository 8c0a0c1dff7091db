"""Clients that read slowly, or nothing: no replica has failed, and nothing is kept for them."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from quire.router import client_response
from tests.unit.router.fake_replica import FakeReplica, Router, _chunk, run
from tests.unit.router.test_connections import LARGE_BYTES, serving

# More than the kernel keeps for a reader that does not read.
NUM_EVENTS, PAD = 160, "x" * 65536
# After which a replica gives up a reader, and how long the client reads nothing.
GIVEN_UP_S, PAUSE_S = 0.3, 2.0


def event(token: int) -> bytes:
    return b'data: {"token": %d, "pad": "%b"}\n\n' % (token, PAD.encode())


class Impatient(FakeReplica):
    """Sends large events, and closes a connection from which nothing is read. num_given_up: of
    these."""

    num_given_up, num_events = 0, NUM_EVENTS

    async def _stream(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        known = len(request.get("output_ids", []))
        for token in range(known, self.num_events):
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


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would have its place of --max-open-requests for ever."""
    monkeypatch.setattr(client_response, "UNREAD_S", 1.5)
    monkeypatch.setattr(client_response, "_CHECK_S", 0.05)
    routers, replica = list[Router](), Impatient()
    replica.num_events = 400

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await routers[0].app(scope, receive, send)

    async def story(port: int) -> None:
        await replica.start()
        routers.append(Router([replica]))
        await routers[0].start()
        body = b'{"tokens":[1],"stream":true}'
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
        request = head % len(body) + body
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.setblocking(False)
        loop, admission = asyncio.get_running_loop(), routers[0].admission
        await loop.sock_connect(silent, ("127.0.0.1", port))
        await loop.sock_sendall(silent, request)
        while not admission.num_open:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        writer.write(request)
        found = await reader.readuntil(b"[DONE]")
        assert found.count(b'{"token": ') == replica.num_events
        writer.close()
        while admission.num_open:
            await asyncio.sleep(0.05)
        assert routers[0].count("quire_router_slow_clients_total") == 1
        silent.close()
        await routers[0].close()
        replica.stop_listening(cuts=True)

    serving(app, story)


@pytest.mark.parametrize("then", [b"POST /v1/completions", b"GET /health"])
def test_a_client_that_asks_again_and_reads_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, then: bytes
) -> None:
    """The next answer cannot begin while an earlier one is unread."""
    monkeypatch.setattr(client_response, "UNREAD_S", 0.5)
    monkeypatch.setattr(client_response, "_CHECK_S", 0.05)
    routers, replica = list[Router](), FakeReplica()
    replica.body = b'{"choices":"%b"}' % bytes(LARGE_BYTES).replace(b"\0", b"x")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await routers[0].app(scope, receive, send)

    async def story(port: int) -> None:
        await replica.start()
        routers.append(Router([replica]))
        await routers[0].start()
        rest = b' HTTP/1.1\r\nHost: localhost\r\ncontent-length: 14\r\n\r\n{"prompt":[1]}'
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(silent, ("127.0.0.1", port))
        await loop.sock_sendall(silent, b"POST /v1/completions" + rest + then + rest)
        while not routers[0].count("quire_router_slow_clients_total"):
            await asyncio.sleep(0.05)
        assert not routers[0].admission.num_open
        assert len(replica.requests) == 1 + then.startswith(b"POST")
        silent.close()
        await routers[0].close()
        replica.stop_listening(cuts=True)

    serving(app, story)
