"""PendingQueries: each query gets one reply or one error, whether or not its caller waits."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.client.pending_queries import PendingQueries


def test_replies_match_their_queries_in_any_order() -> None:
    async def story() -> list[str]:
        asks: PendingQueries[str] = PendingQueries()
        (first, one), (second, two) = asks.open(), asks.open()
        asks.answered(second, "b")
        asks.answered(first, "a")
        asks.answered(first, "again")  # its caller has gone
        return [await one, await two]

    assert asyncio.run(story()) == ["a", "b"]


def test_open_queries_get_the_error_when_the_engine_ends() -> None:
    async def story() -> None:
        asks: PendingQueries[str] = PendingQueries()
        number, gone = asks.open()
        gone.cancel()
        _, waiting = asks.open()
        asks.fail(ValueError("the engine has ended"))
        asks.answered(number, "late")
        with pytest.raises(ValueError, match="the engine has ended"):
            await waiting

    asyncio.run(story())
