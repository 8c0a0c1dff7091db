"""Connections of clients that are no HTTP/1.1 clients as they should be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.router import head_bounds
from quire.router.head_bounds import BoundedHeads
from tests.unit.router.fake_replica import Router

PIECES = [b"data: 1\n\n", b"data: 2\n\n"]
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
# More than the kernel keeps for a client that does not read.
LARGE_BYTES = 16 << 20


async def streams(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in PIECES:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def is_whole(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def serving(app: Any, story: Callable[[int], Awaitable[None]]) -> None:
    async def go() -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        config.load()
        state = ServerState()

        def connect() -> BoundedHeads:
            return BoundedHeads(config=config, server_state=state, app_state={})

        server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
        try:
            async with asyncio.timeout(20):
                await story(server.sockets[0].getsockname()[1])
        finally:
            server.close()

    asyncio.run(go())


async def answer(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Return all that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause_s)
    found = await reader.read()
    writer.close()
    return found


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_of_http_1_0_gets_no_chunks(version: bytes) -> None:
    async def story(port: int) -> None:
        request = HEAD.replace(b"1.1", version) + b"Connection: close\r\n\r\n"
        head, _, body = (await answer(port, request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        if version == b"1.0":
            assert (body, b"chunked" in head) == (b"".join(PIECES), False)
        else:
            assert (body[:3], b"chunked" in head) == (b"9\r\n", True)

    serving(streams, story)


def test_a_whole_answer_to_a_client_of_http_1_0_has_its_length() -> None:
    async def story(port: int) -> None:
        found = await answer(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"content-length: 2\r\n" in found
        assert found.endswith(b"\r\n\r\nok")

    serving(is_whole, story)


def test_a_connection_without_a_whole_head_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has sent nothing, one that sends a header now and then, also after a request."""
    monkeypatch.setattr(head_bounds, "HEAD_TIME_S", 0.3)

    async def story(port: int) -> None:
        assert await answer(port) == b""
        assert await answer(port, HEAD, *[b"x: y\r\n"] * 3, pause_s=0.05) == b""
        monkeypatch.setattr(head_bounds, "HEAD_TIME_S", 2.0)  # beyond pauses of a busy machine
        found = await answer(port, HEAD + b"\r\n", HEAD, pause_s=0.1)
        assert found.endswith(b"\r\n\r\nok")
        kept = await answer(port, HEAD + b"\r\n", *[HEAD + b"\r\n"] * 3, pause_s=0.75)
        assert kept.count(b"\r\n\r\nok") == 4, "with whole heads it stays"

    serving(is_whole, story)


def test_a_connection_with_half_a_body_is_refused_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it then sends more or nothing."""
    monkeypatch.setattr("quire.router.app.BODY_TIME_S", 0.2)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\ncontent-length: 50\r\n\r\n"
    routers = list[Router]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        routers[:] = routers or [Router([])]
        await routers[0].app(scope, receive, send)

    async def story(port: int) -> None:
        for rest in ([], [b"1"] * 4):
            found = await answer(port, head, b'{"tokens":', *rest, pause_s=0.03)
            assert found.startswith(b"HTTP/1.1 408 ")
            assert found.count(b"HTTP/1.1") == 1
            assert b"did not come within 0.2 s" in found
        await routers[0].close()

    serving(app, story)


def test_where_there_is_no_room_the_connections_without_a_request_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that have waited for longest first, kept ones too; an open request stays."""
    monkeypatch.setattr(head_bounds, "max_connections", lambda: 4)
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await gate.wait()
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        asked = asyncio.ensure_future(
            answer(port, HEAD.replace(b"/ ", b"/slow ", 1) + b"Connection: close\r\n\r\n")
        )
        await asyncio.sleep(0.1)
        kept, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        assert await kept.readuntil(b"ok")
        others = []
        for _ in range(4):
            others.append(await asyncio.open_connection("127.0.0.1", port))
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        readers = [kept, *(reader for reader, _ in others)]
        closed = [one.at_eof() or one.exception() is not None for one in readers]
        assert closed == [True, True, False, False, False]
        gate.set()
        assert (await asked).endswith(b"ok")
        for _, one in others:
            one.close()
        writer.close()
        await asyncio.sleep(0.05)
        assert not head_bounds._IDLE

    serving(slow, story)


def test_a_head_is_sent_with_the_first_bytes_of_its_body() -> None:
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await gate.wait()
        for piece, more in ((b"first", True), (b"", False)):
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        reading = asyncio.ensure_future(reader.read(65536))
        await asyncio.sleep(0.1)
        assert not reading.done()
        gate.set()
        found = await reading
        assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\n\r\n5\r\nfirst\r\n" in found
        writer.close()

    serving(slow, story)


@pytest.mark.parametrize("ends", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("status", [200, 204])
def test_a_head_without_a_body_is_sent_at_once(ends: bytes, status: int) -> None:
    """To a HEAD request and with 204, on a connection that is kept or not."""

    async def empty(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(1 if ends else 3):
            writer.write(
                HEAD.replace(b"GET", b"HEAD" if status == 200 else b"GET") + ends + b"\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
        writer.write(b"" if ends else HEAD + b"Connection: close\r\n\r\n")
        assert (await reader.read()).count(b"HTTP/1.1") == (not ends)
        writer.close()

    serving(empty, story)


def test_an_interim_response_is_not_held() -> None:
    """And an application that fails after the head has its head sent before the end."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"12"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("after the head")

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = HEAD.replace(b"GET", b"POST") + b"content-length: 2\r\n"
        writer.write(head + b"expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"12")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()

    serving(fails, story)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def story(port: int) -> None:
        found = await answer(port, HEAD + b"\r\n" + HEAD + b"Connection: close\r\n\r\n")
        assert found.count(b"\r\n\r\nok") == 2

    serving(is_whole, story)


def test_a_client_that_leaves_ends_the_request_that_is_open() -> None:
    """Also where it has sent the next one, which waits."""
    ended = list[str]()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(scope["path"])

    async def story(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD.replace(b"/ ", b"/first ", 1) + b"\r\n" + HEAD + b"\r\n")
        await asyncio.sleep(0.1)
        assert not ended
        writer.transport.abort()
        while not ended:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert ended == ["/first"]

    serving(waits, story)


def test_a_connection_is_closed_after_the_rest_of_a_refused_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request may be answered before its body comes. The next one is answered, too."""
    monkeypatch.setattr(head_bounds, "HEAD_TIME_S", 2.0)

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for rest in (b"12", b"1"):
            writer.write(HEAD.replace(b"GET", b"POST") + b"content-length: 2\r\n\r\n")
            await reader.readuntil(b"ok")
            writer.write(rest)
            await asyncio.sleep(0.05)
        assert await reader.read() == b""
        writer.close()

    serving(is_whole, story)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("ends", [b"", b"Connection: close\r\n"])
def test_a_client_that_does_not_read_the_rest_of_a_response_is_closed(
    monkeypatch: pytest.MonkeyPatch, ends: bytes, reads: bool
) -> None:
    """Else it is kept in memory for ever. One that reads slowly gets all of it."""
    monkeypatch.setattr(head_bounds, "REST_TIME_S", 20.0 if reads else 0.2)

    async def is_large(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % LARGE_BYTES)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(LARGE_BYTES), "more_body": False})

    async def story(port: int) -> None:
        loop, num_bytes = asyncio.get_running_loop(), 0
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, HEAD + ends + b"\r\n")
        await asyncio.sleep(0.0 if reads else 3.0)
        with suppress(ConnectionError):
            while num_bytes < LARGE_BYTES and (piece := await loop.sock_recv(connection, 65536)):
                num_bytes += len(piece)
                await asyncio.sleep(0.005 if reads else 0.0)
        assert (num_bytes >= LARGE_BYTES) == reads
        connection.close()

    serving(is_large, story)
