"""Clients that have only finished sending, as `nc -N` and some proxies do: they are answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.router.fake_replica import FakeReplica, Router
from tests.unit.router.test_connections import HEAD, PIECES, answer, is_whole, serving, streams

CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in PIECES)


async def half_closed(port: int, request: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the answer to a client that sends nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    writer.write_eof()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head, body


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_half_closed_client_gets_its_answer(version: bytes, delay_s: float) -> None:
    """Whether that begins before or after the end of what it sends."""

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(delay_s)
        app = streams if scope["path"] == "/stream" else is_whole
        await app(scope, receive, send)

    async def story(port: int) -> None:
        request = HEAD.replace(b"1.1", version) + b"\r\n"
        head, body = await half_closed(port, request)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.count(b"HTTP/1.1") == 1
        assert body == b"ok"
        head, body = await half_closed(port, request.replace(b"/ ", b"/stream ", 1))
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert body == (b"".join(PIECES) if version == b"1.0" else CHUNKS + b"0\r\n\r\n")

    serving(late, story)


def test_the_end_of_what_is_sent_may_come_between_two_chunks() -> None:
    sent = asyncio.Event()

    async def in_parts(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in PIECES:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await sent.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        await reader.readuntil(PIECES[0] + b"\r\n")
        writer.write_eof()
        await asyncio.sleep(0.1)
        sent.set()
        rest = await reader.read()
        size, _, rest = rest.partition(b"\r\n")
        assert int(size, 16) == len(PIECES[1])
        assert rest == PIECES[1] + b"\r\n0\r\n\r\n"
        writer.close()

    serving(in_parts, story)


def test_pipelined_requests_of_a_half_closed_client_are_all_answered() -> None:
    async def story(port: int) -> None:
        head, body = await half_closed(port, 3 * (HEAD + b"\r\n"))
        assert (head + body).count(b"HTTP/1.1 200 OK") == 3
        assert body.count(b"\r\n\r\nok") == 2

    serving(is_whole, story)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_closes_its_connection_is_still_noticed(has_begun: bool) -> None:
    """Without a reset of its own: only what is sent to it shows that nothing is read."""
    ended = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await streams_without_end(send)
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def streams_without_end(send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECES[0], "more_body": True})

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        if has_begun:
            await reader.readuntil(PIECES[0] + b"\r\n")
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        writer.close()
        async with asyncio.timeout(5):
            await ended.wait()

    serving(waits, story)


def test_half_a_request_of_a_half_closed_client_ends_its_connection() -> None:
    async def story(port: int) -> None:
        for part in (HEAD, HEAD.replace(b"GET", b"POST") + b"content-length: 9\r\n\r\n12"):
            assert (await half_closed(port, part))[1] == b""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    serving(reads, story)


def test_an_answer_of_a_replica_reaches_a_half_closed_client() -> None:
    routers, replica = list[Router](), FakeReplica()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await routers[0].app(scope, receive, send)

    async def story(port: int) -> None:
        await replica.start()
        routers.append(Router([replica]))
        await routers[0].start()
        body = b'{"tokens":[1],"stream":true}'
        rest = b"content-length: %d\r\n\r\n" % len(body) + body
        head, found = await half_closed(port, HEAD.replace(b"GET /", b"POST /generate") + rest)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"data: [DONE]\n\n" in found
        await routers[0].close()
        replica.stop_listening(cuts=True)

    serving(app, story)


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_a_head_without_an_end_is_refused_with_a_code(pause_s: float) -> None:
    async def story(port: int) -> None:
        lines = [b"x: %b\r\n" % (b"y" * 4000)] * 40
        found = await answer(port, HEAD, *lines, pause_s=pause_s)
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert b"\r\nx-quire-error-code: headers_too_large\r\n" in head
        assert b"content-length: %d" % len(body) in head
        assert b'"code":"headers_too_large"' in body

    serving(is_whole, story)


def test_such_a_head_is_not_refused_amid_the_answer_before() -> None:
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in PIECES:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await gate.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def story(port: int) -> None:
        asyncio.get_running_loop().call_later(0.3, gate.set)
        lines = [b"x: %b\r\n" % (b"y" * 4000)] * 40
        found = await answer(port, HEAD + b"\r\n", HEAD, *lines, pause_s=0.002)
        assert found.endswith(b"\r\n\r\n" + CHUNKS + b"0\r\n\r\n")

    serving(slow, story)
