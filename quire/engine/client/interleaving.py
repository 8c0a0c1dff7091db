"""Run several async generators at once and yield their items in order of arrival.

The first error ends all of them. Many generators start one after the other as earlier ones end, so
that one request of a thousand prompts does not fill the engine's queue. Knows no request. Always
holds: when the iteration ends or is closed, every generator is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

T = TypeVar("T")

# Items that wait for their reader; a slow one stops the generators at this many.
_QUEUED_ITEMS = 256
# Generators that run at the same time: as many as a request may have choices, or as leave room in
# the engine's queue beside many short prompts.
MAX_RUNS, SHORT_RUNS = 1024, 256


async def interleaved(
    runs: Sequence[AsyncGenerator[T, None]],
    *,
    max_queued: int = _QUEUED_ITEMS,
    max_runs: int = MAX_RUNS,
) -> AsyncGenerator[T, None]:
    """Yield the items of all runs in order of arrival. The first error ends all runs.

    max_queued: items that wait for their reader; beside these each run waits with one more.
    max_runs: how many run at the same time.
    """
    queue: asyncio.Queue[T | None] = asyncio.Queue(max_queued)
    room = asyncio.Semaphore(max_runs)

    async def feed(run: AsyncIterator[T]) -> None:
        async with aclosing(cast(AsyncGenerator[T, None], run)) as items, room:
            async for item in items:
                await queue.put(item)

    async def feed_all() -> None:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(feed(run))

    feeding = asyncio.ensure_future(feed_all())
    feeding.add_done_callback(lambda _: _wake(queue))
    try:
        while not (feeding.done() and queue.empty()):
            item = await queue.get()
            if item is not None:
                yield item
        _raise_first(feeding)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


def _wake(queue: asyncio.Queue[T | None]) -> None:
    if not queue.full():
        queue.put_nowait(None)


def _raise_first(feeding: asyncio.Future[None]) -> None:
    """Raise the first error of a TaskGroup."""
    error = feeding.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error
