"""How fast memory can be read right now: the floor under everything that streams weights.

Each thread reads its own part of a block far larger than any cache, by a NumPy reduction (which
lets go of the GIL); on the machines it was held against, a C loop over vector registers reads no
faster. Memory speed drifts on shared machines, so this is asked again before each sample.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 30


class ReadProbe:
    """Holds the block of memory that is read, and a thread for each part. Close it when done."""

    def __init__(self, num_threads: int, *, num_bytes: int = BLOCK_BYTES) -> None:
        elements = max(num_bytes // 8 // num_threads, 1)
        self._parts: list[NDArray[np.int64]] = [
            np.ones(elements, np.int64) for _ in range(num_threads)
        ]
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-read")
        self._num_bytes = 8 * elements * num_threads

    def gb_per_s(self, *, rounds: int = 3) -> float:
        """The best of a few rounds, 10^9 bytes a second, all threads together."""
        best_s = min(self._round_s() for _ in range(rounds))
        return self._num_bytes / best_s / 1e9

    def close(self) -> None:
        """End the threads and free the memory."""
        self._threads.shutdown()
        self._parts = []

    def __enter__(self) -> ReadProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _round_s(self) -> float:
        begin = time.perf_counter()
        read = list(self._threads.map(np.bitwise_or.reduce, self._parts))
        seconds = time.perf_counter() - begin
        assert all(value == 1 for value in read), "all of it was read"
        return seconds
