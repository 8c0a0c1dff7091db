"""BlockTransport: how blocks leave an executor's pool for memory of the host, and come back.

One interface for executors on the host, which copy at once, and for asynchronous devices, which
queue the copy and are waited for later. Knows no tier and no thread: the caller decides which may
wait. Invariant: work queued after a block was read may write into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.execute.executor import AsyncExecutor, Executor

Bytes = NDArray[np.uint8]


def nothing() -> None:
    """Wait for nothing: the copy is complete."""


class BlockTransport:
    """Copy blocks between an executor's pool and host memory. most: blocks in transfer at once."""

    def __init__(self, executor: Executor, *, most: int) -> None:
        self._executor = executor
        self._late = executor if isinstance(executor, AsyncExecutor) else None
        if self._late is not None:
            self._late.begin_moving(most)

    def buffers(self, count: int) -> list[Bytes]:
        """Return memory for so many blocks, which the device reads and writes by itself."""
        size = self._executor.block_bytes
        if self._late is None:
            return [np.empty(size, np.uint8) for _ in range(count)]
        return [*self._late.host_memory(count * size).reshape(count, size)]

    def take_out(self, blocks: Sequence[int], raws: Sequence[Bytes]) -> Callable[[], None]:
        """Copy blocks as they are now; raws are filled when what is returned has been called."""
        if self._late is not None:
            return self._late.export_blocks(np.array(blocks, np.int32), raws)
        for block, raw in zip(blocks, raws, strict=True):
            self._executor.export_block(block, raw)
        return nothing

    def queued(self) -> Callable[[], None]:
        """Wait until all work queued so far is done."""
        return nothing if self._late is None else self._late.mark()

    def bring_in(self, blocks: Sequence[int], raws: Sequence[Bytes]) -> None:
        """Make blocks what raws say, and wait until they are. Queued work that reads them must be
        done."""
        if self._late is not None:
            self._late.import_blocks(np.array(blocks, np.int32), raws)
            return
        for block, raw in zip(blocks, raws, strict=True):
            self._executor.import_block(block, raw)
