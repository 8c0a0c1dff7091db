"""A body that is there is read at once; one that is not is waited for, in time, and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.api.gone import Deadline, body_in_time
from quire.base.errors import RequestError, ShuttingDown, TimedOut


def read(work: Coroutine[Any, Any, str], limit_s: float | None = None, **ends: bool) -> str:
    async def reading() -> str:
        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if ends.get("leaves"):
            asyncio.get_running_loop().call_soon(leaving.set_result, None)
        return await body_in_time(work, leaving=leaving, deadline=Deadline(limit_s))

    return asyncio.run(reading())


async def there() -> str:
    assert len(asyncio.all_tasks()) == 1
    return "body"


async def comes_in_parts() -> str:
    told = [await asyncio.sleep(0, "a"), await asyncio.to_thread(str, "b")]
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()
    return "".join(told)


def test_a_body_that_is_there_takes_no_task() -> None:
    assert read(there()) == "body"


def test_one_that_comes_in_parts_is_waited_for() -> None:
    assert read(comes_in_parts()) == "ab"


@pytest.mark.parametrize("waits_first", [False, True])
def test_what_reading_raises_is_raised(waits_first: bool) -> None:
    async def breaks() -> str:
        if waits_first:
            await asyncio.sleep(0)
        raise RequestError("no JSON")

    with pytest.raises(RequestError, match="no JSON"):
        read(breaks())


@pytest.mark.parametrize(
    ("limit_s", "leaves", "error"), [(0.0, False, TimedOut), (None, True, ShuttingDown)]
)
def test_one_that_never_comes_is_closed_at_the_end(
    limit_s: float | None, leaves: bool, error: type[Exception]
) -> None:
    ended: list[str] = []

    async def never() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        finally:
            ended.append("closed")
        return ""

    with pytest.raises(error):
        read(never(), limit_s, leaves=leaves)
    assert ended == ["cancelled", "closed"]
