"""Connections: one without a head is closed, one with a running request is not; TLS is refused."""

from __future__ import annotations

import asyncio
import contextlib
import io
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.api.http import connection
from quire.api.http.connection import Connection, ConnectionState, ConnectionTable
from quire.api.http.refusal import FULL_REPORT, TLS_REPORT, ConnectionReport
from quire.api.openai.dialect import OPENAI
from quire.api.server import warn_of_few_connections
from quire.base.log import Log


async def _slow_app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _echo_app(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _listening(app: Any = _slow_app) -> asyncio.Server:
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    state = ServerState()
    return await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}, dialect=OPENAI), "127.0.0.1", 0
    )


@pytest.mark.parametrize(
    ("sent", "limit_s", "said"),
    [
        (b"", 0.05, b""),
        (b"GET / HTTP/1.1\r\nHost:", 0.05, b""),
        (b"GET / HTTP/1.0\r\n\r\n", 1.0, b"HTTP/1.1 204"),
    ],
)
def test_a_head_must_come_within_a_time(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, limit_s: float, said: bytes
) -> None:
    """An answer may take longer."""
    monkeypatch.setattr(connection, "HEAD_TIME_S", limit_s)

    async def slower(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(limit_s)
        await _slow_app(scope, receive, send)

    async def exchange() -> None:
        server = await _listening(slower)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        assert (await reader.read()).startswith(said)
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


@pytest.mark.parametrize(
    ("framed", "body"),
    [
        (b"\r\n", b""),
        (b"Content-Length: 0\r\n\r\n", b""),
        (b"Content-Length: 2\r\n\r\nok", b"ok"),
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"ok"),
    ],
)
def test_the_body_of_a_request_that_offers_http_2_is_read(framed: bytes, body: bytes) -> None:
    """As of Java's clients and curl --http2, also of those that send the offer again."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"

    async def exchange() -> None:
        server = await _listening(_echo_app)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for given in (offer, offer, b""):
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + given + framed)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"content-length: %d" % len(body) in head
            assert await reader.readexactly(len(body)) == body
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"0\r\nx: ", b"y" * 6000),
        (b"0\r\n", b"x: y\r\n" * 10),
        (b"2\r\nok\r\n2;", b"y" * 6000),
    ],
)
def test_trailers_and_extensions_of_chunks_have_an_end(start: bytes, more: bytes) -> None:
    """Else a client fills the memory, however large a body may be."""
    bodies = list[bool]()

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        message: dict[str, Any] = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
        bodies.append(message["type"] == "http.request")

    async def exchange() -> None:
        server = await _listening(reads)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + start)
        said = asyncio.ensure_future(reader.readline())
        num_sent = 0
        while not said.done() and num_sent < 64 * connection.MAX_HEAD_BYTES:
            writer.write(more)
            num_sent += len(more)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0.001)
        assert (await said).startswith(b"HTTP/1.1 431 ")
        assert b'"headers_too_large"' in await reader.read()
        assert bodies == [False]
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


@pytest.mark.parametrize("more", [b"x: y\r\n" * 2000, b"\0"])
def test_a_request_that_is_answered_before_its_body_comes_gets_no_second_response(
    more: bytes,
) -> None:
    async def exchange() -> None:
        server = await _listening()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2\r\nok\r\n0\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            writer.write(more)
            await asyncio.sleep(0.01)
        assert rest.exception() is not None or rest.result() == b""
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


def test_tls_at_a_plain_port_is_refused_and_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, now_s = io.StringIO(), [100.0]
    report = ConnectionReport(Log("server", lines), TLS_REPORT._text, lambda: now_s[0])
    monkeypatch.setattr(connection, "TLS_REPORT", report)

    async def exchange() -> None:
        server = await _listening()
        for now_s[0] in (100.0, 130.0, 159.0, 161.0):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(bytes.fromhex("16030100c8010000c40303") + bytes(200))
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")
            writer.close()
        server.close()

    asyncio.run(exchange())
    first, second = lines.getvalue().splitlines()
    assert "use http:// in its address, or serve HTTPS with --tls-cert" in first
    assert first.endswith("connections=1")
    assert second.endswith("connections=3")


class _Client:
    def evict(self) -> None:
        pass


def test_connections_closed_without_an_answer_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, now_s = io.StringIO(), [100.0]
    report = ConnectionReport(Log("server", lines), FULL_REPORT._text, lambda: now_s[0])
    monkeypatch.setattr(connection, "FULL_REPORT", report)
    table = ConnectionTable(lambda: 1)
    table.add(_Client(), ConnectionState.IDLE)
    table.add(_Client(), ConnectionState.HEAD)  # evicts the idle one, which expects nothing
    assert not lines.getvalue()
    for now_s[0] in (100.0, 130.0, 161.0):
        table.add(_Client(), ConnectionState.HEAD)
    first, second = lines.getvalue().splitlines()
    assert "as in `ulimit -n 4096`" in first
    assert first.endswith("connections=1")
    assert second.endswith("connections=2")


@pytest.mark.parametrize(("limit", "warns"), [(1, True), (448, True), (960, False)])
def test_a_low_limit_on_open_files_is_logged_with_what_it_leaves(
    limit: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.StringIO()
    monkeypatch.setattr("quire.api.server.max_connections", lambda: limit)
    warn_of_few_connections(Log("server", lines))
    assert lines.getvalue().endswith(f"max_connections={limit}\n" if warns else "")
    assert ("`ulimit -n 4096`" in lines.getvalue()) is warns


def test_a_stream_is_probed_behind_which_half_a_head_was_sent() -> None:
    """By the scope of its own request, and not by that of the next one."""
    probed = asyncio.Event()

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        scope["quire.probe"] = probed.set
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await probed.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async def exchange() -> None:
        server = await _listening(streams)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"one\r\n")
        writer.write(b"GET / HTTP/1.1\r\n")
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await reader.read()).endswith(b"two\r\n0\r\n\r\n")
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


@pytest.mark.parametrize("target", [b"CONNECT a:1", b"GET http://"])
@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_target_that_cannot_be_read_is_refused(before: bytes, target: bytes) -> None:
    async def exchange() -> None:
        server = await _listening()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(before)
        if before:
            await reader.readuntil(b"\r\n\r\n")
        writer.write(target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())
