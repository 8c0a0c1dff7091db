"""Work of clients that may disconnect: bodies in time or late, and every end of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.api.http.request_io import (
    ClientDisconnected,
    Deadline,
    body_in_time,
    disconnect_of,
    run_until_disconnect,
)
from quire.base.errors import QuireError, RequestError, ShuttingDown, TimedOut


def read(work: Coroutine[Any, Any, str], limit_s: float | None = None, **ends: bool) -> str:
    async def reading() -> str:
        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if ends.get("leaves"):
            asyncio.get_running_loop().call_soon(leaving.set_result, None)
        return await body_in_time(work, stopping=leaving, deadline=Deadline(limit_s))

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


def test_a_complete_body_needs_no_task() -> None:
    assert read(there()) == "body"


def test_a_body_in_parts_is_waited_for() -> None:
    assert read(comes_in_parts()) == "ab"


@pytest.mark.parametrize("waits_first", [False, True])
def test_exceptions_of_reading_are_raised(waits_first: bool) -> None:
    async def breaks() -> str:
        if waits_first:
            await asyncio.sleep(0)
        raise RequestError("no JSON")

    with pytest.raises(RequestError, match="no JSON"):
        read(breaks())


@pytest.mark.parametrize(
    ("limit_s", "leaves", "error"), [(0.0, False, TimedOut), (None, True, ShuttingDown)]
)
def test_a_body_that_never_arrives_is_closed_at_the_end(
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


class Ends:
    """The events that may end a request, each a future of the running loop."""

    def __init__(self) -> None:
        new = asyncio.get_running_loop().create_future
        self.gone: asyncio.Future[None] = new()
        self.over: asyncio.Future[None] = new()
        self.cut: asyncio.Future[QuireError] = new()
        self.closed: list[str] = []

    async def run(self, work: Coroutine[Any, Any, str], limit_s: float | None = None) -> str:
        deadline = Deadline(limit_s)
        return await run_until_disconnect(
            work, self.gone, over=self.over, deadline=deadline, cut=self.cut
        )

    async def never(self) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing takes a while: it is waited for
            self.closed.append("closed")
        return ""

    def set(self, name: str) -> None:
        if name == "cut":
            self.cut.set_result(RequestError("aborted"))
        elif name:
            getattr(self, name).set_result(None)


WHY = [("gone", ClientDisconnected), ("over", ShuttingDown), ("cut", RequestError), ("", TimedOut)]


@pytest.mark.parametrize(("name", "error"), WHY)
@pytest.mark.parametrize("before", [False, True])
def test_work_ends_with_the_event_and_its_task_continues(
    name: str, error: type[Exception], *, before: bool
) -> None:
    async def run() -> None:
        ends = Ends()
        if before:
            ends.set(name)
        else:
            asyncio.get_running_loop().call_soon(ends.set, name)
        with pytest.raises(error):
            await ends.run(ends.never(), None if name else 0.0)
        assert ends.closed == ["closed"]
        assert len(asyncio.all_tasks()) == 1
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # nothing is left that could cancel it

    asyncio.run(run())


@pytest.mark.parametrize("name", ["gone", "over", "cut"])
def test_events_after_the_work_is_done_end_nothing(name: str) -> None:
    async def run() -> None:
        ends = Ends()

        async def last() -> str:
            await asyncio.sleep(0)
            ends.set(name)  # its callbacks run in the next turn of the loop
            return "done"

        assert await ends.run(last()) == "done"
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_cancelling_the_task_itself_is_honoured() -> None:
    async def run(*, both: bool) -> None:
        ends = Ends()
        task = asyncio.ensure_future(ends.run(ends.never()))
        await asyncio.sleep(0)
        task.cancel()
        if both:
            ends.set("gone")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends.closed == ["closed"]

    for both in (False, True):
        asyncio.run(run(both=both))


def test_work_that_fails_while_ending_reports_why_it_was_ended() -> None:
    async def run() -> None:
        ends = Ends()

        async def breaks() -> str:
            try:
                return await ends.never()
            except asyncio.CancelledError:
                raise RuntimeError("the connection is gone") from None

        asyncio.get_running_loop().call_soon(ends.set, "gone")
        with pytest.raises(ClientDisconnected):
            await ends.run(breaks())

    asyncio.run(run())


def test_a_server_without_disconnect_events_is_polled() -> None:
    async def run() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        ends = Ends()
        ends.gone = disconnect_of({"type": "http"}, receive)
        asyncio.get_running_loop().call_soon(left.set)
        with pytest.raises(ClientDisconnected):
            await ends.run(ends.never())
        ends.gone = disconnect_of({"type": "http"}, receive)
        assert await ends.run(there_too()) == "done"
        await asyncio.sleep(0)
        assert ends.gone.cancelled()
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert disconnect_of({"type": "http", "quire.disconnected": told}, receive) is told

    async def there_too() -> str:
        return "done"

    asyncio.run(run())
