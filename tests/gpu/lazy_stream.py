"""LazyStream: an asynchronous device on CPU tensors, which does nothing until it is waited for.

A wait runs only what precedes the awaited mark in its stream, and in other streams only what those
marks depend on. So code that reads or writes too early, or relies on an order between streams that
was not enforced, gets wrong results.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execute.gpu.stream import Mark, Stream

UNREAD = -7777  # the value of host copies that have not been made yet


class LazyStream:
    """waits: what was pending when a mark was waited for before the device had reached it. waiters:
    the threads that waited. pinned_bytes: sizes of all memory of callers that was pinned,
    num_unpinned of it not any more. Tests may wait in several threads, as on a device.
    """

    is_beside = True

    def __init__(self, lock: threading.RLock | None = None) -> None:
        self.waits: list[int] = []
        self.waiters: list[str] = []
        self.pinned_bytes: list[int] = []
        self.num_unpinned = 0
        self._lock = threading.RLock() if lock is None else lock
        self._queue: deque[Callable[[], None]] = deque()
        self._said = self._done = 0

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def do(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(call)
            self._said += 1

    def to_device(self, values: NDArray[Any]) -> Tensor:
        given = torch.from_numpy(values.copy())
        target = torch.full_like(given, UNREAD)
        self.copy(given, target)
        return target

    def to_host(self, values: Tensor) -> Tensor:
        target = torch.full_like(values, UNREAD)
        self.copy(values, target)
        return target

    def pinned(self, values: Tensor) -> Tensor:
        return values

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        self.pinned_bytes.append(memory.nbytes)

        def unpin() -> None:
            self.num_unpinned += 1

        return unpin

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.do(lambda: target.copy_(source))

    def mark(self, *, sleeps: bool = False) -> Mark:
        return Place(self, self._said)

    def beside(self) -> Stream:
        return LazyStream(self._lock)

    def behind(self, mark: Mark) -> None:
        assert isinstance(mark, Place)
        self.do(mark.come)

    def come_to(self, place: int) -> bool:
        """Run up to the mark, and return whether anything was pending."""
        with self._lock:
            was_there = self._done >= place
            while self._done < place:
                self._queue.popleft()()
                self._done += 1
            return not was_there

    def waited_for(self, place: int) -> None:
        left = self._said - place
        if self.come_to(place):
            self.waits.append(left)
            self.waiters.append(threading.current_thread().name)


class Place:
    """A Mark."""

    def __init__(self, stream: LazyStream, place: int) -> None:
        self._stream, self._place = stream, place

    def wait(self) -> None:
        self._stream.waited_for(self._place)

    def come(self) -> None:
        """Reach the mark from another stream of the device."""
        self._stream.come_to(self._place)
