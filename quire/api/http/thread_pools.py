"""Threads beside the event loop for what callers make long: templates, whole texts.

Two lanes of a few threads each: one for what is asked with little, one for what may take its time
(large bodies, templates that requests bring along). So that whoever fills the slow lane waits for
himself only: small requests go on, and neither lane takes the threads that read bodies. Knows
nothing of what it runs. Always holds: what has not begun when its caller leaves is never begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Renderings hold the interpreter lock: more at once end no earlier, and keep the loop waiting.
NUM_THREADS = 2


class ThreadPools:
    """The threads of one server. Made and used in the event loop's thread."""

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(NUM_THREADS, "quire-quick")
        self._slow = ThreadPoolExecutor(NUM_THREADS, "quire-slow")

    async def run(
        self, slow: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `function` returns or raises, run in a thread of the lane."""
        lane = self._slow if slow else self._quick
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(lane, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
