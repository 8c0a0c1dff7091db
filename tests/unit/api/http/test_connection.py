"""Connections: one without a head is closed, one with a running request is not; TLS is refused."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.api.http import connection
from quire.api.http.connection import Connection
from quire.api.http.refusal import TlsReport
from quire.api.openai.dialect import OPENAI
from quire.base.log import Log


async def _slow_app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _listening() -> asyncio.Server:
    config = uvicorn.Config(_slow_app, lifespan="off", log_config=None)
    state = ServerState()
    return await asyncio.get_running_loop().create_server(
        lambda: Connection(config, state, {}, dialect=OPENAI), "127.0.0.1", 0
    )


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"", b""), (b"GET / HTTP/1.1\r\nHost:", b""), (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.1 204")],
)
def test_a_head_must_come_within_a_time(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, said: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIME_S", 0.05)

    async def exchange() -> None:
        server = await _listening()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        assert (await reader.read()).startswith(said)
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())


def test_tls_at_a_plain_port_is_refused_and_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, now_s = io.StringIO(), [100.0]
    report = TlsReport(Log("server", lines), lambda: now_s[0])
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
