"""WaitingConnections: connections that come at once are accepted at once, by each HTTP server."""

from __future__ import annotations

import asyncio
import io
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState as HttpState

from quire.api import server as server_module
from quire.api.http.connection import Connection
from quire.api.openai.dialect import OPENAI
from quire.api.server import public_server
from quire.api.server_state import ServerState
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.log import Log
from quire.base.waiting_connections import _FEW, WaitingConnections
from quire.config.server_config import ServerConfig
from quire.obs.metrics import Metrics
from quire.router.head_bounds import BoundedHeads


class _Echo(asyncio.Protocol):
    num_made = 0

    def __init__(self, waiting: WaitingConnections) -> None:
        self._waiting = waiting

    def connection_made(self, transport: Any) -> None:
        type(self).num_made += 1
        self._transport = transport
        if self._waiting.poll(0):
            self._waiting.accept()

    def data_received(self, piece: bytes) -> None:
        self._transport.write(piece)
        self._transport.close()


async def num_iterations(num_clients: int, num_running: int, max_accepted: int = 1024) -> int:
    """Return the iterations of the loop in which clients that come at once are accepted."""
    _Echo.num_made = 0
    with socket.create_server(("127.0.0.1", 0), backlog=2 * num_clients) as listening:
        address = listening.getsockname()
        waiting = WaitingConnections(listening, _Echo, range(num_running))
        waiting._max_accepted = max_accepted  # whatever the limit on open files
        server = await waiting.serve(2 * num_clients)
        clients = [socket.create_connection(address) for _ in range(num_clients)]
        for number, client in enumerate(clients):
            client.sendall(b"%d" % number)
        count = 0
        while _Echo.num_made < num_clients:
            await asyncio.sleep(0)
            count += 1
        for number, client in enumerate(clients):
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(client, 10) == b"%d" % number
            assert await loop.sock_recv(client, 10) == b"", "closed by the server"
            client.close()
        server.close()
    return count


@pytest.mark.parametrize(
    ("num_clients", "num_running", "most"),
    [(3 * _FEW // 2, 0, 8), (10 * _FEW, 10 * _FEW, 8), (10 * _FEW, 3 * _FEW, 20)],
)
def test_connections_that_come_together_are_accepted_in_few_iterations_of_the_loop(
    num_clients: int, num_running: int, most: int
) -> None:
    """As many at once as requests run, which make iterations long."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(num_iterations(num_clients, num_running)) <= most


@pytest.mark.parametrize(("num_running", "max_accepted"), [(0, 1024), (1000, _FEW)])
def test_a_flood_is_accepted_in_turns(num_running: int, max_accepted: int) -> None:
    """Where few requests run, or with few descriptors."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(num_iterations(20 * _FEW, num_running, max_accepted)) >= 20


def test_a_socket_that_was_closed_accepts_nothing() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            waiting = WaitingConnections(listening, _Echo)
        waiting.accept()
        assert not waiting._tasks

    asyncio.run(story())


async def answer_of(listening: Any) -> bytes:
    """Return the answer to a request over a connection of its own."""
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("protocol", [partial(Connection, dialect=OPENAI), BoundedHeads])
@pytest.mark.parametrize("is_first", [False, True])
def test_http_connections_accept_those_that_wait_behind_them(protocol: Any, is_first: bool) -> None:
    accepted = list[str]()
    waiting = SimpleNamespace(poll=lambda ms: is_first, accept=lambda: accepted.append("all"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def story() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        create = asyncio.get_running_loop().create_server
        made = partial(protocol, config, HttpState(), {}, waiting=waiting)
        server = await create(made, "127.0.0.1", 0)
        assert (await answer_of(server.sockets[0])).startswith(b"HTTP/1.1 204")
        server.close()

    asyncio.run(story())
    assert accepted == ["all"] * is_first


@pytest.mark.parametrize("has_siblings", [False, True])
def test_of_several_api_processes_none_takes_all_that_wait(
    has_siblings: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have one socket: those accepted at once would be the connections of one of them."""
    made = list[WaitingConnections]()

    def make(*arguments: Any) -> WaitingConnections:
        made.append(WaitingConnections(*arguments))
        return made[-1]

    monkeypatch.setattr(server_module, "WaitingConnections", make)

    async def story() -> None:
        state = ServerState(ServerConfig(), Metrics(), Log("test", io.StringIO()))
        siblings = SiblingWorkers(tmp_path, 1) if has_siblings else None
        server = public_server(state, siblings)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.ensure_future(server.serve(sockets=[listening]))
            assert (await answer_of(listening)).startswith(b"HTTP/1.1 503")
            server.should_exit = True
            await serving

    asyncio.run(story())
    assert len(made) == (not has_siblings)
