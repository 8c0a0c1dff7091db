"""TlsListener: connections without room are closed, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

import pytest

from quire.api.http import tls
from quire.api.http.connection import ConnectionState, ConnectionTable
from quire.api.http.refusal import FULL_REPORT
from quire.api.http.tls import TlsListener

NUM_CONNECTIONS = 4


class Answering:
    """A connection with a running request, which is not evicted."""

    def evict(self) -> None:
        raise AssertionError("it has a request")


def test_a_handshake_without_room_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is evicted in the iteration in which it is accepted, before its task has begun."""
    table = ConnectionTable(lambda: NUM_CONNECTIONS)
    refused = list[bool]()
    monkeypatch.setattr(tls, "OPEN_CONNECTIONS", table)
    monkeypatch.setattr(FULL_REPORT, "add", lambda: refused.append(True))

    async def check() -> None:
        loop, running = asyncio.get_running_loop(), [Answering() for _ in range(NUM_CONNECTIONS)]
        for one in running:
            table.add(one, ConnectionState.ACTIVE)
        listening = socket.create_server(("127.0.0.1", 0))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        listener = TlsListener(listening, context, asyncio.Protocol, b"")
        for _ in range(3):
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, listening.getsockname())
                with suppress(ConnectionError):
                    assert await loop.sock_recv(client, 1) == b""
            for _ in range(4):
                await asyncio.sleep(0)  # the task ends, and then its callbacks are called
        assert not listener._handshakes
        assert len(table) == NUM_CONNECTIONS
        assert len(asyncio.all_tasks()) == 1
        listener.close()
        listening.close()
        for one in running:
            table.remove(one)

    asyncio.run(check())
    assert len(refused) == 3
