"""Unread output: a slow reader is reported once, and once more when it has caught up."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.client.open_streams import UnreadQueue


def test_a_long_backlog_is_reported_once_and_a_short_one_again_once() -> None:
    async def exchange() -> None:
        told: list[tuple[bool, int]] = []
        unread: UnreadQueue[int] = UnreadQueue(
            8, lambda is_held: told.append((is_held, len(unread)))
        )
        for number in range(12):
            unread.put(number)
        assert told == [(True, 9)]
        assert unread.is_held
        assert [await unread.get() for _ in range(12)] == list(range(12))
        assert told == [(True, 9), (False, 2)]
        assert not unread.is_held

    asyncio.run(exchange())


def test_a_fast_reader_is_never_reported() -> None:
    async def exchange() -> None:
        told: list[bool] = []
        unread: UnreadQueue[int] = UnreadQueue(2, told.append)
        for number in range(100):
            unread.put(number)
            assert await unread.get() == number
        assert told == []

    asyncio.run(exchange())


def test_a_waiting_reader_gets_new_output() -> None:
    async def exchange() -> None:
        unread: UnreadQueue[str] = UnreadQueue(2, lambda is_held: None)
        waiting = asyncio.ensure_future(unread.get())
        await asyncio.sleep(0)
        unread.put("a")
        assert await waiting == "a"

    asyncio.run(exchange())


def test_nothing_is_lost_if_a_reader_is_cancelled_before_or_after_its_wake_up() -> None:
    async def exchange() -> None:
        unread: UnreadQueue[str] = UnreadQueue(9, lambda is_held: None)
        for comes_first in (False, True):
            waiting = asyncio.ensure_future(unread.get())
            await asyncio.sleep(0)
            if comes_first:
                unread.put("b")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            if not comes_first:
                unread.put("a")
                assert await unread.get() == "a"
        assert await unread.get() == "b"
        assert len(unread) == 0

    asyncio.run(exchange())


def test_reading_available_output_yields_to_others() -> None:
    async def exchange() -> None:
        unread: UnreadQueue[int] = UnreadQueue(1000, lambda is_held: None)
        for number in range(100):
            unread.put(number)
        at: list[int] = []

        async def other() -> None:
            while len(unread):
                at.append(len(unread))
                await asyncio.sleep(0)

        turns = asyncio.ensure_future(other())
        assert [await unread.get() for _ in range(100)] == list(range(100))
        await turns
        assert len(at) >= 5

    asyncio.run(exchange())
