"""Work for a caller who may leave: until it is done, the caller is gone, or time is over.

Knows neither JSON nor the engine. Always holds: when `until_gone` returns or raises, the work has
ended, and everything it held (the engine's generators among it) has been closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from quire.base.errors import ShuttingDown, TimedOut

T = TypeVar("T")


class ClientGone(Exception):
    """The caller closed the connection; nobody is left to answer."""


async def until_gone(
    work: Coroutine[Any, Any, T],
    receive: Receive,
    *,
    over: asyncio.Future[None],
    limit_s: float | None,
) -> T:
    """The result of `work`, cancelled when the caller leaves, `over` is set, or `limit_s` passed.

    Raises ClientGone, ShuttingDown and TimedOut for these three, else what `work` raises. The
    request's body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    ends: set[asyncio.Future[Any]] = {task, watch, over}
    try:
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if over.done():
            raise ShuttingDown("the server is shutting down and its grace time is over; try again")
        if watch.done():
            raise ClientGone
        raise TimedOut(
            f"the request ran for its whole time limit of {limit_s:g} s (--request-timeout); ask "
            "for fewer tokens, or try again when less is asked"
        )
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
