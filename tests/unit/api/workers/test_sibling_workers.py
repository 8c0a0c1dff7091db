"""Between API processes: a forwarded exchange arrives in pieces, and the latest state wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from quire.api.server_state import ServerState
from quire.api.workers.relay import SiblingExchange, SiblingGone
from quire.api.workers.sibling_workers import SiblingWorkers, WorkerState
from quire.base.log import Log
from quire.config.server_config import ServerConfig
from quire.obs.metrics import Metrics

LIMIT_S = 60.0
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def played(path: Path, answer: Answer, story: Callable[[Path], Awaitable[None]]) -> None:
    """Run a script against a process with the given answer."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        with suppress(OSError):  # the other end has closed first
            await writer.wait_closed()
        left.set()

    async def play() -> None:
        async with await asyncio.start_unix_server(answered, path / "peer.2"):
            await asyncio.wait_for(story(path / "peer.2"), LIMIT_S)
            await asyncio.wait_for(left.wait(), LIMIT_S)

    left = asyncio.Event()

    asyncio.run(play())


async def ask(peer: Path, *, limit_s: float = LIMIT_S) -> SiblingExchange:
    return await SiblingExchange.open(peer, "GET", "/x", headers={"a": "b"}, limit_s=limit_s)


def test_pieces_are_forwarded_as_they_arrive_with_backpressure(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\na: b\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX-Y: z\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"3\r\nabc\r\n")
        await go_on.wait()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")

    async def story(peer: Path) -> None:
        exchange = await ask(peer)
        assert exchange.status == 200
        assert (b"x-y", b"z") in exchange.headers
        pieces = exchange.pieces()
        assert await anext(pieces) == b"abc"
        go_on.set()
        assert [piece async for piece in pieces] == [b"de"]
        exchange.close()

    go_on = asyncio.Event()
    played(tmp_path, answer, story)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"no HTTP at all\r\n\r\n",
    ],
)
def test_a_truncated_answer_is_never_a_complete_one(tmp_path: Path, said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async def whole(peer: Path) -> bytes:
        exchange = await ask(peer)
        try:
            return await exchange.read()
        finally:
            exchange.close()

    async def story(peer: Path) -> None:
        with pytest.raises(SiblingGone):
            await whole(peer)

    played(tmp_path, answer, story)


def test_an_unresponsive_process_counts_as_absent(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other end closes

    async def story(peer: Path) -> None:
        with pytest.raises(SiblingGone):
            await ask(peer, limit_s=0.01)
        with pytest.raises(SiblingGone):
            await ask(peer.with_name("peer.3"))

    played(tmp_path, answer, story)


def state(version: tuple[int, int], *, paused: bool = False, draining: bool = False) -> WorkerState:
    return WorkerState(
        version=version,
        paused=paused,
        draining=draining,
        log_level="error" if paused else "info",
        open_requests=0,
        held_requests=0,
    )


def test_the_latest_state_wins_in_any_order(tmp_path: Path) -> None:
    async def story() -> None:
        for order in ((1, 2, 3), (3, 2, 1), (2, 3, 1)):
            told = {
                1: state((1, 2), draining=True),
                2: state((2, 1)),
                3: state((2, 3), paused=True),
            }
            server_state = ServerState(ServerConfig(), Metrics(), Log("test"))
            peers = SiblingWorkers(tmp_path, 1)
            for at in order:
                peers.adopt(server_state, told[at])
            assert (server_state.lifecycle.paused, server_state.lifecycle.draining) == (True, False)
            assert server_state.log.level == "error"
            assert peers.state(server_state).version == (2, 3)

    asyncio.run(story())


def test_a_stopping_server_is_not_resumed_by_another(tmp_path: Path) -> None:
    async def story() -> None:
        server_state = ServerState(ServerConfig(), Metrics(), Log("test"))
        server_state.lifecycle.drain()
        SiblingWorkers(tmp_path, 1).adopt(server_state, state((5, 2), paused=True))
        assert server_state.lifecycle.draining
        assert not server_state.lifecycle.paused  # the waiting request gets an error

    asyncio.run(story())
