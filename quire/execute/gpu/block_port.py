"""BlockPort: transfers of KV blocks between a pool on a device and host memory.

Two streams beside the steps' stream, one each way, so that steps never wait for the bus. An
outgoing block is first gathered, in the steps' stream, into a staging row on the device: steps
queued later may overwrite the block at once, and the row crosses the bus in one copy meanwhile. An
incoming block crosses into a staging row and is scattered into the pool from there, beside the
steps, none of which refers to it yet. Whole blocks are moved, not layers: a step reads a block only
after all of it has arrived, so steps do not change, captured ones included. Knows no tier. Always
holds: queueing never waits; a staging row is reused only behind the copy that read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import CapacityError
from quire.execute.gpu.kv_pool import KvPool
from quire.execute.gpu.stream import Mark, Stream

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Pair = tuple[Tensor, Tensor]


class BlockPort:
    """Transfers of one pool, with `rows` staging rows each way. One thread, which also queues the
    steps, exports; any thread imports, one after another. Raises CapacityError where memory does
    not suffice."""

    def __init__(self, pool: KvPool, device: torch.device, stream: Stream, *, rows: int) -> None:
        self._pool, self._stream, self.rows = pool, stream, rows
        self._importing = threading.Lock()  # a tier and an exchange have a thread each
        self._leaving, self._coming = stream.beside(), stream.beside()
        shape = rows, pool.block_bytes
        try:
            self._rows_out = torch.empty(shape, dtype=torch.uint8, device=device)
            self._rows_in = torch.empty(shape, dtype=torch.uint8, device=device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"{2 * rows} blocks on their way to the host and back ({2 * rows * shape[1]} "
                f"bytes) do not fit into the memory of {device}; lower --kv-cache-memory"
            ) from error
        # What these rows were before, if anything, is still being done in the device's own order.
        for beside in (self._leaving, self._coming):
            beside.behind(stream.mark())
        self._next = 0  # row of those that leave
        self._read: list[Mark | None] = [None] * rows  # behind which a row may be written again

    def take_out(self, blocks: Int32s, outs: Sequence[Bytes]) -> Callable[[], None]:
        """Queue copies of blocks as they are now to outs; the returned function waits for them.
        Values before scales, layer after layer."""
        first = 0
        while first < len(blocks):
            count = min(len(blocks) - first, len(self._read) - self._next)
            self._take_rows(blocks[first : first + count], outs[first : first + count])
            first += count
        return self._leaving.mark(sleeps=True).wait

    def bring_in(self, blocks: Int32s, raws: Sequence[Bytes]) -> None:
        """Make blocks what raws say, and wait until they are. What else reads or writes them must
        be over."""
        with self._importing:
            for first in range(0, len(blocks), self.rows):
                piece = blocks[first : first + self.rows]
                rows = self._rows_in[: len(piece)]
                for row, raw in zip(rows, raws[first : first + self.rows], strict=True):
                    self._coming.copy(torch.from_numpy(raw), row)
                listed = self._coming.to_device(piece.astype(np.int64))
                self._coming.do(partial(self._scatter, rows, listed))
            self._coming.mark(sleeps=True).wait()

    def _take_rows(self, blocks: Int32s, outs: Sequence[Bytes]) -> None:
        """By the next rows, of which there are enough before the last."""
        first, end = self._next, self._next + len(blocks)
        self._next = end % len(self._read)
        rows = self._rows_out[first:end]
        for mark in {mark for mark in self._read[first:end] if mark is not None}:
            self._stream.behind(mark)
        listed = self._stream.to_device(blocks.astype(np.int64))
        self._stream.do(partial(self._gather, rows, listed))
        self._leaving.behind(self._stream.mark())
        for row, out in zip(rows, outs, strict=True):
            self._leaving.copy(row, torch.from_numpy(out))
        self._read[first:end] = [self._leaving.mark()] * len(blocks)

    def _gather(self, rows: Tensor, listed: Tensor) -> None:
        for blocks, part in self._pairs(rows):
            torch.index_select(blocks, 1, listed, out=part)

    def _scatter(self, rows: Tensor, listed: Tensor) -> None:
        for blocks, part in self._pairs(rows):
            blocks.index_copy_(1, listed, part)

    def _pairs(self, rows: Tensor) -> Iterator[Pair]:
        """Of values and of scales: the pool's words [layers, blocks, words of one], and where they
        lie in rows [n, block_bytes], as [layers, n, words]."""
        words, first = rows.view(torch.int64), 0
        for held in self._pool.parts():
            blocks = held.flatten(2).view(torch.int64)
            layers, _, size = blocks.shape
            part = words[:, first : first + layers * size].unflatten(1, (layers, size))
            yield blocks, part.transpose(0, 1)
            first += layers * size
