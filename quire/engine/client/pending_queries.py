"""Asks: questions an engine was asked that it has not answered yet.

Independent of what is queried. Always holds: each query gets one answer or one error, also
where the engine ends or the caller has stopped waiting.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class PendingQueries(Generic[Answer]):
    """Questions by number, each a future of the running event loop. before: their numbers begin
    behind it."""

    def __init__(self, before: int = 0) -> None:
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._last = before

    def open(self) -> tuple[int, asyncio.Future[Answer]]:
        """Return a new question: its number, and its answer to come."""
        self._last += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[self._last] = answer
        return self._last, answer

    def answered(self, number: int, answer: Answer) -> None:
        """Deliver the answer to query `number`; its caller may have stopped waiting."""
        waiting = self._open.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Fail all open queries: no answer will come."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._open.clear()
