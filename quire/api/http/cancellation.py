"""Work for a caller who may leave: until it is done, the caller is gone, or time is over.

Knows neither JSON nor the engine. Always holds: when `run_until_disconnect` returns or raises, the
work has ended, and everything it held (the engine's generators among it) has been closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from quire.base.errors import QuireError, ShuttingDown, TimedOut

T = TypeVar("T")

# A body that takes longer than this is not on its way.
BODY_TIME_S = 60.0


class ClientDisconnected(Exception):
    """The caller closed the connection; nobody is left to answer."""


class _Late(Exception):
    """Time is over."""


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


def disconnect_of(scope: Scope, receive: Receive) -> asyncio.Future[None]:
    """Set when a request's caller leaves. The request's body must have been read before.

    Our own connections tell it (connection.py); of any other's a task waits for its word.
    """
    told: asyncio.Future[None] | None = scope.get("quire.gone")
    return asyncio.ensure_future(_disconnected(receive)) if told is None else told


async def run_until_disconnect(
    work: Coroutine[Any, Any, T],
    gone: asyncio.Future[None] | None,
    *,
    over: asyncio.Future[None],
    deadline: Deadline,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    """The result of `work`, cancelled when the caller leaves, `over` is set, or time is over.

    Raises ClientDisconnected, ShuttingDown and TimedOut for these three, the error that `cut` is
    set to, else what `work` raises. gone: of disconnect_of; None where nobody is there to leave.
    """
    try:
        return await _until(work, gone, over=over, limit_s=deadline.left_s(), cut=cut)
    except _Late:
        raise TimedOut(
            f"the request ran for its whole time limit of {deadline.limit_s} s "
            "(--request-timeout); ask for fewer tokens, or try again when less is asked"
        ) from None
    finally:
        if isinstance(gone, asyncio.Task):
            gone.cancel()


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
    try:
        return await _until(work, None, over=leaving, limit_s=limit_s)
    except _Late:
        raise TimedOut(
            f"the request's body did not come within {limit_s:g} s; send it faster, or send less"
        ) from None


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


async def _until(
    work: Coroutine[Any, Any, T],
    gone: asyncio.Future[None] | None,
    *,
    over: asyncio.Future[None],
    limit_s: float | None,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    """`work`, in the task we are in, which is cancelled to end it: a request needs no other."""
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    cancelling, ended_by, is_over = task.cancelling(), list[BaseException](), False

    def end(why: BaseException) -> None:
        # A callback may be under way when all is over; what is being closed is left to that.
        if not (ended_by or is_over or task.cancelling() > cancelling):
            ended_by.append(why)
            task.cancel()

    def on_gone(_: object) -> None:
        end(ClientDisconnected())

    def on_over(_: object) -> None:
        end(ShuttingDown("the server is shutting down and ended this request; try again"))

    def on_cut(cut: asyncio.Future[QuireError]) -> None:
        end(cut.result())

    ends: list[tuple[asyncio.Future[Any], Callable[[Any], None]]] = [(over, on_over)]
    if cut is not None:
        ends.append((cut, on_cut))
    if gone is not None:
        ends.append((gone, on_gone))
    for future, tell in ends:
        future.add_done_callback(tell)
    timer = None
    if limit_s is not None:
        timer = asyncio.get_running_loop().call_later(limit_s, end, _Late())
    try:
        return await work
    except BaseException:
        # Cancelled by us, unless somebody else wants this task ended too.
        if ended_by and task.uncancel() <= cancelling:
            raise ended_by[0] from None
        raise
    finally:
        is_over = True
        if timer is not None:
            timer.cancel()
        for future, tell in ends:
            future.remove_done_callback(tell)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
