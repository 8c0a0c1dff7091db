"""Current memory bandwidth: the floor of everything that streams weights.

All threads together read a block far larger than any cache, by a plain loop of the compiled module
(native/src/limits.cc). Bandwidth drifts on shared machines, so it is measured again before each
sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire import _native

BLOCK_BYTES = 1 << 30


class ReadProbe:
    """Holds the block of memory to read and the reading threads. Close it when done."""

    def __init__(self, num_threads: int, *, num_bytes: int | None = None, isa: str = "") -> None:
        num_bytes = BLOCK_BYTES if num_bytes is None else num_bytes
        block: NDArray[np.uint8] = np.ones(num_bytes + 64, np.uint8)
        first = -block.ctypes.data % 64  # no load may touch two lines
        self._block = block[first : first + num_bytes]
        self._pool: _native.Pool | None = _native.Pool(num_threads, isa=isa)

    def gb_per_s(self, *, rounds: int = 3) -> float:
        """Return the best of a few rounds, in 10^9 bytes per second, all threads together."""
        assert self._pool is not None, "the probe is closed"
        read = [_native.limit(self._pool, "read", 1, self._block) for _ in range(rounds)]
        assert all(num_bytes == self._block.nbytes for num_bytes, _ in read), "all of it was read"
        return self._block.nbytes / min(seconds for _, seconds in read) / 1e9

    def close(self) -> None:
        """End the threads and free the memory."""
        self._pool = None
        self._block = np.empty(0, np.uint8)

    def __enter__(self) -> ReadProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
