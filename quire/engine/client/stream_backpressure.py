"""Unread: what was said to one caller and not taken yet, and a word when it becomes too much.

A reader that does not keep up is told of once, and again when it has caught up to a quarter of
the bound: whoever makes what is said stops meanwhile. In place of asyncio.Queue, for one reader, as
there is a wake-up a token. Knows no message and no engine. Always holds: nothing is dropped, and
order is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Said = TypeVar("Said")

# So many may be taken without anybody else having had a turn.
_IN_A_ROW = 16


class UnreadQueue(Generic[Said]):
    """most: how many may wait before `on_hold(True)` is called; `on_hold(False)` when few do.

    is_held: whether the last call was the first of these. All in the event loop's thread.
    """

    def __init__(self, most: int, on_hold: Callable[[bool], None]) -> None:
        self._most = most
        self._on_hold = on_hold
        self._loop = asyncio.get_running_loop()
        self._said: deque[Said] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.is_held = False
        self._num_in_a_row = 0

    def __len__(self) -> int:
        return len(self._said)

    def put(self, said: Said) -> None:
        """Something more was said."""
        self._said.append(said)
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():  # its reader was cancelled, if it is
                waiting.set_result(None)
        if not self.is_held and len(self._said) > self._most:
            self._tell(True)

    async def get(self) -> Said:
        """The next; waits for it. Others get a turn even where much is there: among them who reads
        what the engine says, and learns that it is too much."""
        self._num_in_a_row += 1
        if self._num_in_a_row > _IN_A_ROW:
            self._num_in_a_row = 0
            await asyncio.sleep(0)
        while not self._said:
            self._num_in_a_row = 0
            self._waiting = self._loop.create_future()
            await self._waiting
        said = self._said.popleft()
        if self.is_held and len(self._said) <= self._most // 4:
            self._tell(False)
        return said

    def _tell(self, is_held: bool) -> None:
        self._on_hold(is_held)
        self.is_held = is_held
