"""ReadAhead: read announced blocks in background threads before they are requested.

This keeps the disk busy while earlier blocks are copied, and computes checksums in parallel. Knows
places and how to read one, no files; is used from one thread. Always holds: at most BUFFERS blocks
are read ahead; a block that was read before its place changed is never returned, provided that the
caller calls `forget` before the change.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Reads a place into a buffer; returns its digest, None if the block is missing or damaged.
Read = Callable[[int, Bytes], bytes | None]

THREADS = 2
BUFFERS = 4


class ReadAhead:
    """read: called in its threads and in the caller's, with pages of num_bytes."""

    def __init__(self, read: Read, num_bytes: int) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(THREADS, "quire-tier-read")
        self._own = _pages(num_bytes)
        self._free = [_pages(num_bytes) for _ in range(BUFFERS)]
        self._announced: deque[int] = deque()
        self._begun: dict[int, tuple[Future[bytes | None], Bytes]] = {}

    def expect(self, places: Sequence[int]) -> None:
        """Announce places that will be read next, in this order, each once."""
        for place in places:
            if place not in self._begun and place not in self._announced:
                self._announced.append(place)
        self._begin()

    def read(self, place: int, out: Bytes) -> bytes | None:
        """Read a block into `out` and return its digest; None if missing. Raises OSError."""
        begun = self._begun.pop(place, None)
        if begun is None:
            if place in self._announced:
                self._announced.remove(place)
            digest, pages = self._read(place, self._own), self._own
        else:
            future, pages = begun
            try:
                digest = future.result()
            finally:
                self._free.append(pages)
        if digest is not None:
            out[:] = pages[: len(out)]
        self._begin()
        return digest

    def forget(self, place: int | None = None) -> None:
        """Drop what was read of this place, or of every place, which is about to change."""
        places = list(self._begun) if place is None else [place]
        if place is None:
            self._announced.clear()
        for one in places:
            if (begun := self._begun.pop(one, None)) is not None:
                future, pages = begun
                if not future.cancel():
                    future.exception()  # waits for its end
                self._free.append(pages)

    def close(self) -> None:
        """Read nothing any more."""
        self.forget()
        self._threads.shutdown()

    def _begin(self) -> None:
        while self._announced and self._free:
            place = self._announced.popleft()
            pages = self._free.pop()
            self._begun[place] = (self._threads.submit(self._read, place, pages), pages)


def _pages(num_bytes: int) -> Bytes:
    """Return memory that begins with a page, as reads past the page cache want it."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
