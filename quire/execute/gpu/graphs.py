"""Captured steps: a ladder of sizes, each computed once as usual, then captured, then replayed.

A step of one token a sequence is launched as the next larger size of the ladder, so that few
graphs serve all batches; its rows beyond the real ones do nothing that is seen. Graphs are made
when a size first comes and share one pool of memory. Knows no program and no kernel: `capture`
turns a function into something to be replayed. Always holds: a size's function is run before it
is captured, so that everything it launches has been compiled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Protocol

import torch


class Capture(Protocol):
    """Records what a function launches, without doing it; the result does it."""

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]: ...


def ladder(most: int) -> tuple[int, ...]:
    """Sizes up to `most`: close where few rows wait for launches, then in steps."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 513, 32)]
    sizes += range(576, max(most, 576) + 64, 64)
    return (*(size for size in sizes if size < most), most)


class Graphs:
    """Graphs by key, where the key says a size and what is in it."""

    def __init__(self, capture: Capture, most: int) -> None:
        self._capture = capture
        self._sizes = ladder(most)
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._is_full = False  # there was no memory for another

    def size_for(self, rows: int) -> int:
        """The size that a step of so many rows is launched as; rows are at most the ladder's."""
        return self._sizes[bisect_left(self._sizes, rows)]

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Do what `body` does: the first time by itself, later by replaying it, if there was memory
        to capture it."""
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        body()
        if not self._is_full:
            try:
                self._replays[key] = self._capture(body)
            except torch.OutOfMemoryError:
                self._is_full = True  # what was not captured is launched as usual

    def clear(self) -> None:
        """Forget all: addresses they hold are no longer true."""
        self._replays.clear()
        self._is_full = False


class CudaCapture:
    """CUDA graphs in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # What another thread asks the device for meanwhile (blocks that come) is none of it.
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), capture:
            body()
        replay: Callable[[], None] = graph.replay
        return replay
