"""Pieces of a body that are taken as they arrive, and chunks that are written without a message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.router.faults import ReplicaFault
from quire.router.head_bounds import WRITER
from quire.router.http_client import READ_BYTES, Exchange
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_connections import HEAD, answer, serving
from tests.unit.router.test_failover import ANSWER


def handing(story: Callable[[Exchange], Awaitable[None]]) -> None:
    async def go() -> None:
        exchange = Exchange(asyncio.get_running_loop(), may_be_stale=False)
        exchange.got_head(200, [])
        async with asyncio.timeout(20):
            await story(exchange)

    asyncio.run(go())


async def waits(exchange: Exchange, take: Callable[[bytes], bool]) -> asyncio.Task[bool]:
    task = asyncio.ensure_future(exchange.hand_over(take))
    await asyncio.sleep(0)
    return task


def test_pieces_are_taken_at_once_until_the_body_ends() -> None:
    async def story(exchange: Exchange) -> None:
        found = list[bytes]()
        exchange.got(b"0")

        def take(piece: bytes) -> bool:
            found.append(piece)
            return True

        task = await waits(exchange, take)
        for piece in (b"1", b"2", b"3"):
            assert not exchange.got(piece)
            assert found[-1] == piece, "before any other task runs"
        assert not task.done()
        exchange.completed()
        assert await task is False
        assert found == [b"0", b"1", b"2", b"3"]

    handing(story)


def test_what_comes_after_a_piece_that_needs_a_wait_is_kept() -> None:
    async def story(exchange: Exchange) -> None:
        found = list[bytes]()

        def take(piece: bytes) -> bool:
            found.append(piece)
            return piece != b"stop"

        task = await waits(exchange, take)
        for piece in (b"1", b"stop", b"2"):
            exchange.got(piece)
        assert found == [b"1", b"stop"]
        assert await task is True
        assert found == [b"1", b"stop"]
        task = await waits(exchange, take)
        assert found == [b"1", b"stop", b"2"]
        exchange.got(b"stop")
        exchange.completed()
        assert await task is True
        assert await exchange.hand_over(take) is False

    handing(story)


def test_an_error_of_what_takes_pieces_reaches_the_task() -> None:
    async def story(exchange: Exchange) -> None:
        def take(piece: bytes) -> bool:
            raise ReplicaFault(piece.decode(), is_suspect=True)

        task = await waits(exchange, take)
        exchange.got(b"one")
        exchange.got(b"two")
        with pytest.raises(ReplicaFault, match="one"):
            await task
        assert await exchange.read() == b"two"

    handing(story)


def test_a_lost_connection_ends_the_wait_after_the_last_piece() -> None:
    async def story(exchange: Exchange) -> None:
        found = list[bytes]()

        def take(piece: bytes) -> bool:
            found.append(piece)
            return True

        task = await waits(exchange, take)
        exchange.got(b"1")
        exchange.lost("gone")
        with pytest.raises(ReplicaFault, match="gone"):
            await task
        assert found == [b"1"]

    handing(story)


def test_a_piece_that_needs_a_wait_is_not_lost_with_the_connection() -> None:
    """It may be the last of its stream."""

    async def story(exchange: Exchange) -> None:
        task = await waits(exchange, lambda piece: False)
        exchange.got(b"last")
        exchange.lost("gone")
        assert await task is True
        with pytest.raises(ReplicaFault, match="gone"):
            await exchange.hand_over(lambda piece: True)

    handing(story)


def test_a_task_that_is_cancelled_takes_nothing_more() -> None:
    async def story(exchange: Exchange) -> None:
        found = list[bytes]()

        def take(piece: bytes) -> bool:
            found.append(piece)
            return True

        task = await waits(exchange, take)
        task.cancel()
        exchange.got(b"1")
        with pytest.raises(asyncio.CancelledError):
            await task
        exchange.got(b"2")
        assert not found
        assert await exchange.read() == b"12"

    handing(story)


def test_of_much_that_comes_at_once_a_part_is_taken_in_each_turn() -> None:
    async def story(exchange: Exchange) -> None:
        sizes = list[int]()

        def take(piece: bytes) -> bool:
            sizes.append(len(piece))
            return True

        task = await waits(exchange, take)
        exchange.got(*[b"x" * (READ_BYTES // 4)] * 12)
        assert not sizes
        await asyncio.sleep(0)
        assert sizes == [READ_BYTES]
        exchange.completed()
        assert await task is False
        assert sizes == [READ_BYTES] * 3

    handing(story)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_chunks_can_be_written_once_the_response_has_begun(version: bytes) -> None:
    """To a client that knows chunks."""
    could = list[bool]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        writer = scope[WRITER]
        could.append(writer.can_write)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        could.append(writer.can_write)  # the head is held
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        could.append(writer.can_write)
        if writer.can_write:
            writer.write_piece(b"two")
            writer.write_piece(b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        could.append(writer.can_write)

    async def story(port: int) -> None:
        request = HEAD.replace(b"1.1", version) + b"Connection: close\r\n\r\n"
        body = (await answer(port, request)).partition(b"\r\n\r\n")[2]
        is_new = version == b"1.1"
        assert body == (b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" if is_new else b"one")
        assert could == [False, False, is_new, False]

    serving(app, story)


def test_a_client_that_does_not_read_gets_no_more_chunks() -> None:
    written = list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        writer, num = scope[WRITER], 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while writer.can_write:
            writer.write_piece(b"x" * 100_000)
            num += 1
        written.append(num)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def story(port: int) -> None:
        found = await answer(port, HEAD + b"Connection: close\r\n\r\n", pause_s=0.1)
        assert found.endswith(b"0\r\n\r\n")
        assert found.count(b"x") > 100_000 * written[0]

    serving(app, story)


@pytest.mark.parametrize("slow_s", [0.0, 0.01])
def test_a_stream_is_the_same_for_a_client_that_reads_slowly(slow_s: float) -> None:
    replica = FakeReplica()

    async def story(router: Router) -> None:
        on_piece: Any = (lambda piece: asyncio.sleep(slow_s)) if slow_s else (lambda piece: None)
        request = {"tokens": [1], "stream": True}
        assert (await router.post("/generate", request, on_piece=on_piece))[2] == ANSWER

    run([replica], story)
