"""A connection without a head is closed; one with a running request is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.api.http import connection
from quire.api.http.connection import Connection
from quire.api.openai.dialect import OPENAI


async def _slow_app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"", b""), (b"GET / HTTP/1.1\r\nHost:", b""), (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.1 204")],
)
def test_a_head_must_come_within_a_time(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, said: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIME_S", 0.05)

    async def exchange() -> None:
        config = uvicorn.Config(_slow_app, lifespan="off", log_config=None)
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(config, state, {}, dialect=OPENAI), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        assert (await reader.read()).startswith(said)
        writer.close()
        server.close()
        await server.wait_closed()

    asyncio.run(exchange())
