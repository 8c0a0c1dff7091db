"""Clients that send much that is no request, or many requests at one time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.router import head_bounds
from quire.router.head_bounds import MAX_HEAD_BYTES, MAX_PIPELINED
from tests.unit.router.test_connections import HEAD, PIECES, answer, is_whole, serving, streams

CHUNKED = HEAD.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
MANY = 64 * MAX_HEAD_BYTES


async def body_of(receive: Callable[[], Awaitable[Any]]) -> bytes | None:
    """Return a request's body; None where its client leaves before its end."""
    found = bytearray()
    while (message := await receive())["type"] == "http.request":
        found += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(found)
    return None


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"5\r\nhello\r\n0\r\n", b"x: y\r\n" * 1000),
        (b"5\r\nhello\r\n0\r\nx: ", b"y" * 6000),
        (b"5\r\nhello\r\n5;", b"y" * 6000),
    ],
)
def test_trailers_and_extensions_of_chunks_have_an_end(
    start: bytes, more: bytes, is_refused: bool
) -> None:
    """Else a client fills the memory, however large a body may be."""
    bodies = list[bytes | None]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not is_refused:
            bodies.append(await body_of(receive))
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + start)
        num_sent = 0
        try:
            while num_sent < MANY and not reader.at_eof():
                writer.write(more)
                num_sent += len(more)
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            pass
        assert num_sent < MANY
        writer.close()
        await asyncio.sleep(0.05)
        assert bodies == ([] if is_refused else [None])

    serving(app, story)


def test_a_body_of_small_chunks_and_some_trailers_is_read() -> None:
    size = 5 * MAX_HEAD_BYTES

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await body_of(receive) == b"z" * size
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        raw = CHUNKED + b"1\r\nz\r\n" * size + b"0\r\nx: y\r\n\r\n"
        found = await answer(port, raw, HEAD + b"Connection: close\r\n\r\n")
        assert found.count(b"HTTP/1.1 200 OK") == 1, "the second one has no body"

    serving(app, story)


def test_the_rest_of_a_refused_body_may_be_long() -> None:
    async def story(port: int) -> None:
        size = 5 * MAX_HEAD_BYTES
        raw = HEAD.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % size
        parts = [b"z" * (size // 5)] * 5 + [HEAD + b"Connection: close\r\n\r\n"]
        found = await answer(port, raw, *parts, pause_s=0.02)
        assert found.count(b"HTTP/1.1 200 OK") == 2

    serving(is_whole, story)


@pytest.mark.parametrize("num_behind", [0, 2])
def test_half_of_the_next_head_does_not_end_the_answer_before_it(
    monkeypatch: pytest.MonkeyPatch, num_behind: int
) -> None:
    """A client may send requests one after the other: what has come of the last one is an accident
    of the network, and while others wait nothing more is read."""
    monkeypatch.setattr(head_bounds, "HEAD_TIME_S", 0.2)
    has_begun = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        has_begun.set()
        await asyncio.sleep(0.3)
        await streams(scope, receive, send)

    async def story(port: int) -> None:
        last = HEAD + b"Connection: close\r\n\r\n"
        asking = asyncio.ensure_future(
            answer(port, (HEAD + b"\r\n") * (1 + num_behind) + last[:20], last[20:], pause_s=0.25)
        )
        await has_begun.wait()
        assert not head_bounds._IDLE, "it has a request"
        found = await asking
        assert found.count(b"HTTP/1.1 200 OK") == 2 + num_behind
        assert found.count(PIECES[1]) == 2 + num_behind

    serving(slow, story)


def test_half_a_head_behind_an_answer_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_bounds, "HEAD_TIME_S", 0.2)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        found = await answer(port, HEAD + b"\r\n" + HEAD)
        assert found.count(b"HTTP/1.1 200 OK") == 1
        assert loop.time() - began_s > 0.45

    serving(slow, story)


def test_of_many_requests_at_one_time_some_are_answered() -> None:
    """Each that waits takes a hundred times as much memory as it has bytes."""
    paths = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        assert await body_of(receive) == b"12"
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        head = HEAD.replace(b"GET", b"POST") + b"content-length: 2\r\n\r\n12"
        raw = b"".join(head.replace(b"/ ", b"/%d " % at, 1) for at in range(2000))
        found = await answer(port, raw)
        num = found.count(b"HTTP/1.1 200 OK")
        assert paths == [f"/{at}" for at in range(num)]
        assert num == 1 + MAX_PIPELINED
        assert b"connection: close" in found[found.rindex(b"HTTP/1.1") :]

    serving(app, story)


@pytest.mark.parametrize(("method", "body"), [(b"GET", b""), (b"POST", b""), (b"POST", b"12")])
def test_a_client_that_offers_http_2_is_answered_by_http_1(method: bytes, body: bytes) -> None:
    """As Java's and curl's do, which send their next request without the offer."""
    bodies = list[bytes | None]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(await body_of(receive))
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        head = HEAD.replace(b"GET", method)
        length = b"content-length: %d\r\n" % len(body) if method == b"POST" else b""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for offer in (UPGRADE, UPGRADE, b""):
            writer.write(head + offer + length + b"\r\n" + body)
            found = await asyncio.wait_for(reader.readuntil(b"ok"), 5)
            assert found.startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        assert bodies == [body] * 3

    serving(app, story)


@pytest.mark.parametrize(
    "second",
    [
        HEAD + b"\r\n" + CHUNKED + b"no length\r\n",
        CHUNKED + b"no length\r\n",
        b"no request\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"\0" * 10,
    ],
    ids=["third", "body", "line", "target", "zeros"],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_what_is_no_request_does_not_change_the_answer_before(
    has_begun: bool, second: bytes
) -> None:
    """A refusal amid that, or ahead of it, would be taken for the answer to the first request."""
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await body_of(receive)
        if not has_begun:
            await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": PIECES[0], "more_body": True})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def story(port: int) -> None:
        asyncio.get_running_loop().call_later(0.2, gate.set)
        found = await answer(port, HEAD + b"\r\n", second, pause_s=0.05)
        head, _, body = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert body.startswith(b"9\r\n" + PIECES[0] + b"\r\n0\r\n\r\n")
        assert found.count(b"HTTP/1.1 ") == 1 + second.startswith(HEAD + b"\r\n")

    serving(slow, story)


def test_an_answered_request_gets_no_second_response_for_its_trailers() -> None:
    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED + b"5\r\nhello\r\n0\r\n")
        await reader.readuntil(b"\r\n\r\nok")
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            writer.write(b"x: y\r\n" * 2000)
            await asyncio.sleep(0.01)
        assert rest.exception() is not None or rest.result() == b""
        writer.close()

    serving(is_whole, story)


def test_what_is_no_http_is_refused() -> None:
    """Also behind an answer that is complete."""

    async def story(port: int) -> None:
        for before in (b"", HEAD + b"\r\n"):
            found = await answer(port, before, b"no request\r\n\r\n", pause_s=0.05)
            assert found.count(b"HTTP/1.1 200 OK") == bool(before)
            head, _, body = found[found.index(b"HTTP/1.1 400 ") :].partition(b"\r\n\r\n")
            assert b"\r\nconnection: close\r\n" in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", None)
            assert "content-length" in error["message"]

    serving(is_whole, story)


def test_an_idle_connection_keeps_nothing_of_its_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of them may have sent long prompts."""
    connections = list[head_bounds.BoundedHeads]()
    made = head_bounds.BoundedHeads.connection_made

    def connection_made(self: head_bounds.BoundedHeads, transport: asyncio.Transport) -> None:
        connections.append(self)
        made(self, transport)

    monkeypatch.setattr(head_bounds.BoundedHeads, "connection_made", connection_made)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        await is_whole(scope, receive, send)

    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b"z" * 50_000
        writer.write(HEAD.replace(b"GET", b"POST") + b"content-length: 50000\r\n\r\n" + body)
        await reader.readuntil(b"\r\n\r\nok")
        [connection] = connections
        kept = [one for one in vars(connection).values() if isinstance(one, bytes)]
        assert sum(map(len, kept)) < 1000
        writer.close()

    serving(app, story)
