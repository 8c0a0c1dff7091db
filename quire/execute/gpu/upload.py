"""Upload: bytes of mapped files to a device, by threads: as fast as file, host or bus allow.

A file's pages are copied into one of two rooms of pinned memory, which the device empties while the
other is filled. Knows no weights. Always holds: a room is written again only when the device has
read it; what was copied is there for all work queued in the same stream afterwards.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execute.gpu.stream import Mark, Stream

Bytes = NDArray[np.uint8]
ROOM_BYTES = 64 * 2**20
MAX_THREADS = 4
MIN_THREAD_BYTES = 2**20  # fewer bytes are not worth a thread


class Upload:
    """Until it is closed. room_bytes: of each of two rooms, where the device works beside the host;
    elsewhere bytes are copied once, since PyTorch has no read-only tensors."""

    def __init__(self, stream: Stream, *, room_bytes: int = ROOM_BYTES) -> None:
        self._stream, self._size, self._turn = stream, room_bytes, 0
        self._num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="quire-upload")
        count = 2 if stream.is_beside else 0
        self._rooms = [stream.host_memory(room_bytes) for _ in range(count)]
        self._read: list[Mark | None] = [None] * count  # behind which a room may be written again

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what the device still reads; end the threads."""
        self._threads.shutdown()
        if error is None:
            for mark in self._read:
                if mark is not None:
                    mark.wait()

    def copy(self, raw: Bytes, target: Tensor) -> None:
        """Bytes [n] into a tensor of the same number of bytes, side by side."""
        flat = target.view(-1).view(torch.uint8)
        if not self._rooms:
            flat.copy_(torch.from_numpy(np.array(raw)))
            return
        for first in range(0, len(raw), self._size):
            piece = raw[first : first + self._size]
            room = self._emptied()[: len(piece)]
            self._fill(room.numpy(), piece)
            self._stream.copy(room, flat[first : first + len(piece)])
            self._read[self._turn] = self._stream.mark()

    def _emptied(self) -> Tensor:
        """Return the room that was filled longest ago."""
        self._turn = 1 - self._turn
        mark = self._read[self._turn]
        if mark is not None:
            mark.wait()
        return self._rooms[self._turn]

    def _fill(self, room: Bytes, piece: Bytes) -> None:
        share = max(-(-len(piece) // self._num_threads), MIN_THREAD_BYTES)
        firsts = range(0, len(piece), share)
        parts = [(room[first : first + share], piece[first : first + share]) for first in firsts]
        for copied in [self._threads.submit(np.copyto, *part) for part in parts]:
            copied.result()
