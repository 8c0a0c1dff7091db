"""WaitingConnections: connections that come at once are accepted at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop

from quire.base.waiting_connections import _MAX_ACCEPTED, WaitingConnections


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


def test_connections_that_come_together_are_accepted_in_few_iterations_of_the_loop() -> None:
    num_clients = 3 * _MAX_ACCEPTED // 2

    async def story() -> int:
        with socket.create_server(("127.0.0.1", 0), backlog=2 * num_clients) as listening:
            address = listening.getsockname()
            waiting = WaitingConnections(listening, _Echo)
            waiting._max_accepted = _MAX_ACCEPTED  # whatever the limit on open files
            server = await waiting.serve(2 * num_clients)
            clients = [socket.create_connection(address) for _ in range(num_clients)]
            for number, client in enumerate(clients):
                client.sendall(b"%d" % number)
            num_iterations = 0
            while _Echo.num_made < num_clients:
                await asyncio.sleep(0)
                num_iterations += 1
            for number, client in enumerate(clients):
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(client, 10) == b"%d" % number
                assert await loop.sock_recv(client, 10) == b"", "closed by the server"
                client.close()
            server.close()
        return num_iterations

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(story()) <= 8


def test_a_socket_that_was_closed_accepts_nothing() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            waiting = WaitingConnections(listening, _Echo)
        waiting.accept()
        assert not waiting._tasks

    asyncio.run(story())
