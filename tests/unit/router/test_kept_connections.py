"""Connections to replicas after the last event of a stream: its body may end a moment later. And
those in use when their pool is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.base.server_url import server_url
from quire.router import http_client
from quire.router.faults import ReplicaFault
from quire.router.http_client import ConnectionPool, Exchange
from tests.unit.router.fake_replica import FakeReplica, Router, run

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n"
LAST, END = b"6\r\nlast\n\n\r\n", b"0\r\n\r\n"


class Server:
    """A server that sends the parts of its responses when a test says so."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.num_requests = 0
        self.ended = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read requests until the connection ends."""
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.num_requests += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended += 1
        finally:
            writer.close()


Story = Callable[[Server, ConnectionPool], Awaitable[None]]


def serving(story: Story) -> None:
    async def go() -> None:
        server = Server()
        listening = await asyncio.start_server(server.connection, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        pool = ConnectionPool(server_url(f"http://127.0.0.1:{port}"), 2.0)
        async with asyncio.timeout(20):
            await story(server, pool)
        pool.close()
        listening.close()

    asyncio.run(go())


async def asked(server: Server, pool: ConnectionPool) -> Exchange:
    """Send a request and return once the server has it."""
    before = server.num_requests
    exchange = await pool.send(b"GET", b"/", [(b"host", b"a")], b"")
    await until(lambda: server.num_requests > before)
    return exchange


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


async def left(server: Server, pool: ConnectionPool, headers: bytes = b"") -> Exchange:
    """Read a response up to its last event, and leave it."""
    exchange = await asked(server, pool)
    server.writers[-1].write(HEAD % headers + LAST)
    await exchange.head()
    assert await exchange.read() == b"last\n\n"
    assert not exchange.is_complete
    exchange.leave()
    assert exchange.is_complete
    assert await exchange.read() == b""
    return exchange


def test_a_body_that_ends_after_its_last_event_costs_no_connection() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        for _ in range(3):
            await left(server, pool)
            server.writers[0].write(END)
            await asyncio.sleep(0.05)
        assert (len(server.writers), server.num_requests, server.ended) == (1, 3, 0)

    serving(story)


def test_the_end_of_a_body_may_come_in_pieces() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        await left(server, pool)
        for piece in (END[:2], END[2:]):
            server.writers[0].write(piece)
            await asyncio.sleep(0.05)
        await asked(server, pool)
        assert len(server.writers) == 1

    serving(story)


def test_a_request_before_the_end_of_a_body_gets_a_connection_of_its_own() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        await left(server, pool)
        await left(server, pool)
        assert len(server.writers) == 2
        server.writers[0].write(END)
        await asyncio.sleep(0.05)
        await asked(server, pool)
        assert (len(server.writers), server.ended) == (2, 0)

    serving(story)


def test_a_connection_with_a_body_that_does_not_end_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_STALE_AFTER_S", 0.05)

    async def story(server: Server, pool: ConnectionPool) -> None:
        await left(server, pool)
        await asyncio.sleep(0.1)
        await asked(server, pool)
        await until(lambda: server.ended == 1)
        assert len(server.writers) == 2

    serving(story)


@pytest.mark.parametrize(
    ("headers", "rest"),
    [
        (b"", b"4\r\nmore\r\n"),
        (b"", b"no chunk"),
        (b"connection: close\r\n", END),
        (b"", END + END),
    ],
)
def test_what_is_no_end_of_a_body_ends_the_connection(headers: bytes, rest: bytes) -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        await left(server, pool, headers)
        server.writers[0].write(rest)
        await until(lambda: server.ended == 1)
        await asked(server, pool)
        assert len(server.writers) == 2

    serving(story)


def test_a_response_with_more_than_its_last_event_is_cut() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        exchange = await asked(server, pool)
        server.writers[0].write(HEAD % b"" + LAST)
        await exchange.head()
        exchange.leave()
        await until(lambda: server.ended == 1)

    serving(story)


def test_a_server_that_closes_instead_of_ending_a_body_is_asked_anew() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        exchange = await left(server, pool)
        server.writers[0].close()
        await asyncio.sleep(0.05)
        assert not exchange.has_failed
        await asked(server, pool)
        assert len(server.writers) == 2

    serving(story)


def test_a_connection_that_was_kept_before_the_end_of_a_body_can_fail() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        await left(server, pool)
        server.writers[0].write(END)
        await asyncio.sleep(0.05)
        exchange = await asked(server, pool)
        server.writers[0].close()
        with pytest.raises(ReplicaFault):
            await exchange.head()

    serving(story)


def test_a_connection_in_use_when_its_pool_is_closed_is_not_kept() -> None:
    """As of a probe of a replica that the discovery has just dropped."""

    async def story(server: Server, pool: ConnectionPool) -> None:
        exchange = await asked(server, pool)
        pool.close()
        server.writers[0].write(HEAD % b"" + LAST + END)
        await exchange.head()
        assert await exchange.body() == b"last\n\n"  # its response is not cut
        await asked(server, pool)  # a fenced replica's pool goes on
        assert len(server.writers) == 2
        await until(lambda: server.ended == 1)

    serving(story)


def test_a_connection_that_is_left_after_its_pool_was_closed_is_not_kept() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        exchange = await asked(server, pool)
        pool.close()
        server.writers[0].write(HEAD % b"" + LAST)
        await exchange.head()
        assert await exchange.read() == b"last\n\n"
        exchange.leave()
        await until(lambda: server.ended == 1)

    serving(story)


def test_a_connection_being_opened_when_its_pool_is_closed_is_not_kept() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        sending = asyncio.ensure_future(asked(server, pool))
        await asyncio.sleep(0)  # it has begun, and waits for the loop
        pool.close()
        exchange = await sending
        server.writers[0].write(HEAD % b"" + LAST + END)
        await exchange.head()
        await exchange.body()
        await asked(server, pool)
        assert len(server.writers) == 2

    serving(story)


def test_connections_of_a_pool_that_was_closed_before_are_kept() -> None:
    async def story(server: Server, pool: ConnectionPool) -> None:
        pool.close()
        for _ in range(2):
            exchange = await asked(server, pool)
            server.writers[0].write(HEAD % b"" + LAST + END)
            await exchange.head()
            await exchange.body()
        assert (len(server.writers), server.ended) == (1, 0)

    serving(story)


def test_streams_one_after_the_other_use_one_connection() -> None:
    replica = FakeReplica()
    replica.ends_late_s = 0.02

    async def story(router: Router) -> None:
        await asyncio.sleep(0.1)
        before = replica.num_closed  # one without beats
        for _ in range(3):
            status, _, body = await router.post("/generate", {"tokens": [1], "stream": True})
            assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
            await asyncio.sleep(0.1)
        assert (len(replica.requests), replica.num_closed) == (3, before)

    run([replica], story)
