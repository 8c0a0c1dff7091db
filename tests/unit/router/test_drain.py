"""A router that stops: what is open may end, and new connections go to routers beside it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router import server
from quire.router.service import RouterService
from quire.router.settings import RouterSettings
from tests.unit.router.fake_replica import FakeReplica, Listed

HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\ncontent-length: %d\r\n\r\n"
WHOLE, STREAM = b'{"tokens":[1]}', b'{"tokens":[1],"stream":true}'
GRACE_S = 8.0


def request(body: bytes) -> bytes:
    return HEAD % len(body) + body


def listening_at(port: int, *, is_shared: bool) -> socket.socket:
    found = socket.socket()
    if is_shared:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind(("127.0.0.1", port))
    found.listen(100)
    found.setblocking(False)
    return found


@asynccontextmanager
async def routing(
    replica: FakeReplica, listening: socket.socket
) -> AsyncIterator[asyncio.Task[int]]:
    """A router's process, without the process; of several the newest gets the signals."""
    ready, log = asyncio.Event(), Log("router", io.StringIO())
    settings = RouterSettings(probe_s=0.1, grace_s=GRACE_S)

    def open_service() -> Awaitable[RouterService]:
        return RouterService.open(settings, Listed((server_url(replica.url),)), log)

    serving = asyncio.ensure_future(
        server._serve(open_service, listening, log, lambda _: ready.set())
    )
    try:
        await ready.wait()
        yield serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def run(story: Callable[[FakeReplica], Awaitable[None]]) -> None:
    async def go() -> None:
        replica = FakeReplica()
        await replica.start()
        async with asyncio.timeout(30):
            await story(replica)
        replica.stop_listening(cuts=True)
        await asyncio.sleep(0.01)

    asyncio.run(go())


@pytest.fixture(autouse=True)
def _heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of the tests' own process stays as it is."""
    monkeypatch.setattr(server, "freeze_heap", lambda: None)


def test_an_answer_may_be_read_until_the_grace_time_is_over() -> None:
    """It was complete before the router stopped, but its client reads slowly."""

    async def story(replica: FakeReplica) -> None:
        replica.body = b'{"text":"%b"}' % (b"x" * (12 << 20))
        listening = listening_at(0, is_shared=False)
        port, loop = listening.getsockname()[1], asyncio.get_running_loop()
        async with routing(replica, listening) as serving:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, request(WHOLE))
            found = bytearray(await loop.sock_recv(client, 65536))
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(3.5)
            assert not serving.done()
            while not found.endswith(b'x"}') and (piece := await loop.sock_recv(client, 1 << 20)):
                found += piece
            assert bytes(found).partition(b"\r\n\r\n")[2] == replica.body
            client.close()
            began_s = loop.time()
            assert await serving == 0
            assert loop.time() - began_s < 4.0

    run(story)


def test_a_client_that_reads_nothing_holds_up_a_stop_no_longer_than_the_grace_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.unit.router.test_drain.GRACE_S", 1.0)

    async def story(replica: FakeReplica) -> None:
        replica.body = b'{"text":"%b"}' % (b"x" * (12 << 20))
        listening = listening_at(0, is_shared=False)
        port, loop = listening.getsockname()[1], asyncio.get_running_loop()
        async with routing(replica, listening) as serving:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(request(WHOLE))
            await reader.readuntil(b"\r\n\r\n")
            began_s = loop.time()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0
            assert 0.9 < loop.time() - began_s < 5.0
            writer.close()

    run(story)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_refused_client_is_sent_to_another_connection(is_shared: bool) -> None:
    """One that is kept leads to the router that stops, again and again."""

    async def story(replica: FakeReplica) -> None:
        replica.gate = asyncio.Event()
        listening = listening_at(0, is_shared=is_shared)
        port = listening.getsockname()[1]
        async with routing(replica, listening) as serving:
            open_, writing = await asyncio.open_connection("127.0.0.1", port)
            writing.write(request(STREAM))
            kept, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(WHOLE))
            head = await kept.readuntil(b"[]}")
            assert b"connection: close" not in head
            await replica.began.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            head, _, body = request(WHOLE).partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            await asyncio.sleep(0.1)
            writer.write(body)
            refusal = await kept.read()
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in refusal
            assert b"shutting_down" in refusal
            replica.gate.set()
            assert (await open_.readuntil(b"0\r\n\r\n")).count(b"[DONE]") == 1
            assert await serving == 0
            writing.close()
            writer.close()

    run(story)


def test_of_routers_that_share_a_port_one_that_stops_leaves_it_to_the_others() -> None:
    async def story(replica: FakeReplica) -> None:
        replica.gate = asyncio.Event()
        first = listening_at(0, is_shared=True)
        port = first.getsockname()[1]
        second = listening_at(port, is_shared=True)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(routing(replica, first))
            stopping = await stack.enter_async_context(routing(replica, second))
            streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(24)]
            for _, writer in streams:
                writer.write(request(STREAM))
            while len(replica.requests) < len(streams):
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            for _ in range(24):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request(WHOLE))
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
                writer.close()
            assert not stopping.done(), "it has streams of its own"
            replica.gate.set()
            for reader, writer in streams:
                assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
                writer.close()
            assert await stopping == 0

    run(story)
