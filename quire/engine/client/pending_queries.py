"""PendingQueries: queries to an engine that have no reply yet.

The content of a query does not matter here. Invariant: each query gets one reply or one error, also
if the engine ends or its caller has stopped waiting.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class PendingQueries(Generic[Answer]):
    """Queries by number, each a future of the running event loop.

    before: the last number that is already used.
    """

    def __init__(self, before: int = 0) -> None:
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._last = before

    def open(self) -> tuple[int, asyncio.Future[Answer]]:
        """Return the number of a new query and the future of its reply."""
        self._last += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[self._last] = answer
        return self._last, answer

    def answered(self, number: int, answer: Answer) -> None:
        """Resolve query `number`; its caller may have stopped waiting."""
        waiting = self._open.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail all pending queries: no more replies will come."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._open.clear()
