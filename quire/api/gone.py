"""Work for a caller who may leave: until it is done, the caller is gone, or time is over.

Knows neither JSON nor the engine. Always holds: when `until_gone` returns or raises, the work has
ended, and everything it held (the engine's generators among it) has been closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from quire.base.errors import QuireError, ShuttingDown, TimedOut

T = TypeVar("T")

# A body that takes longer than this is not on its way.
BODY_TIME_S = 60.0


class ClientGone(Exception):
    """The caller closed the connection; nobody is left to answer."""


class Deadline:
    """When a request's time is over, counted from its making. `limit_s` None: never."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._began_s = asyncio.get_running_loop().time()

    def left_s(self) -> float | None:
        """Seconds that are left, at least 0."""
        if self.limit_s is None:
            return None
        return max(0.0, self.limit_s - (asyncio.get_running_loop().time() - self._began_s))


async def until_gone(
    work: Coroutine[Any, Any, T],
    receive: Receive | None,
    *,
    over: asyncio.Future[None],
    deadline: Deadline,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    """The result of `work`, cancelled when the caller leaves, `over` is set, or time is over.

    Raises ClientGone, ShuttingDown and TimedOut for these three, the error that `cut` is set to,
    else what `work` raises. The request's body must have been read before. receive: None where
    nobody is there to leave.
    """
    watch = None if receive is None else asyncio.ensure_future(_disconnected(receive))
    late = (
        f"the request ran for its whole time limit of {deadline.limit_s} s (--request-timeout); "
        "ask for fewer tokens, or try again when less is asked"
    )
    left_s = deadline.left_s()
    return await _first_of(work, watch, over=over, limit_s=left_s, late=late, cut=cut)


async def body_in_time(
    work: Coroutine[Any, Any, T], *, leaving: asyncio.Future[None], deadline: Deadline
) -> T:
    """What reading a body gives: in time, and while the server takes requests.

    Raises TimedOut and ShuttingDown, else what `work` raises. A body that is there already is read
    without a task of its own, as nearly all are.
    """
    if not leaving.done():
        try:
            waits_for = work.send(None)
        except StopIteration as read:
            body: T = read.value
            return body
        work = _rest(work, waits_for)
    left_s = deadline.left_s()
    limit_s = BODY_TIME_S if left_s is None else min(left_s, BODY_TIME_S)
    late = f"the request's body did not come within {limit_s:g} s; send it faster, or send less"
    return await _first_of(work, None, over=leaving, limit_s=limit_s, late=late)


async def _rest(work: Coroutine[Any, Any, T], waits_for: Any) -> T:
    """The rest of a coroutine that has been begun and now waits for something."""
    return await _steps(work, waits_for)


@coroutine
def _steps(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    try:
        while True:
            try:
                told = yield waits_for
            except BaseException as error:  # noqa: BLE001  it is the coroutine's to deal with
                waits_for = work.throw(error)
            else:
                waits_for = work.send(told)
    except StopIteration as done:
        result: T = done.value
        return result


async def _first_of(
    work: Coroutine[Any, Any, T],
    watch: asyncio.Future[None] | None,
    *,
    over: asyncio.Future[None],
    limit_s: float | None,
    late: str,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    task = asyncio.ensure_future(work)
    waiting: list[asyncio.Future[Any]] = [task] if watch is None else [task, watch]
    ends: set[asyncio.Future[Any]] = {*waiting, over} if cut is None else {*waiting, over, cut}
    try:
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if cut is not None and cut.done():
            raise cut.result()
        if over.done():
            raise ShuttingDown("the server is shutting down and ended this request; try again")
        if watch is not None and watch.done():
            raise ClientGone
        raise TimedOut(late)
    finally:
        if watch is not None or not task.done():  # else all has ended, and was told above
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
