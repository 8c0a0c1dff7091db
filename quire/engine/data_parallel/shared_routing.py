"""SharedRouting: the RoutingState of several API processes, in a file that all of them map.

    path = create_shared_routing(path, num_processes=2, num_engines=4)      # the supervisor
    state = SharedRouting(path, process=0)                                  # each API process

Words of 64 bits: a head (sizes, key of block names), OpenCounts by process and engine, and a
SharedHistory. Knows no engine and no message. Always holds: each process writes its
own counts only, so that they need no lock; what one has added is seen by the next choice of any.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from quire.base.errors import SettingError
from quire.engine.data_parallel.routing_state import HISTORY_BLOCKS, OpenCounts
from quire.routing.prefix_history import History
from quire.routing.shared_history import KEY_BYTES, SharedHistory, keyed_block_names

_WORD_BYTES = 8
# Numbers of processes and of engines, then the key.
_HEAD_WORDS = 2 + KEY_BYTES // _WORD_BYTES
_COUNTS = len(OpenCounts._fields)


def create_shared_routing(path: Path, *, num_processes: int, num_engines: int) -> None:
    """Create the file, in a directory that only this user can enter. Raises SettingError."""
    counts = num_processes * num_engines * _COUNTS
    num_bytes = (_HEAD_WORDS + counts + num_engines * HISTORY_BLOCKS) * _WORD_BYTES
    sizes = num_processes.to_bytes(_WORD_BYTES, "little") + num_engines.to_bytes(
        _WORD_BYTES, "little"
    )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                # Reserved now: a mapped page without room on the file system would end a process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            else:  # as on macOS
                os.ftruncate(descriptor, num_bytes)
            os.pwrite(descriptor, sizes + os.urandom(KEY_BYTES), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SettingError(
            f"{num_bytes} bytes for the routing of {num_engines} engines cannot be had at "
            f"{path}: {error.strerror}; set TMPDIR to a directory with room"
        ) from error


class SharedRouting:
    """A RoutingState. process: the number of this one, from 0 on."""

    def __init__(self, path: Path, process: int) -> None:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        signed, words = memoryview(mapped).cast("q"), memoryview(mapped).cast("Q")
        self._num_engines, num_processes = words[1], words[0]
        self._key = bytes(mapped[2 * _WORD_BYTES : _HEAD_WORDS * _WORD_BYTES])
        num_counts = num_processes * self._num_engines * _COUNTS
        self._counts = signed[_HEAD_WORDS : _HEAD_WORDS + num_counts]
        self._process = process
        self.history: History = SharedHistory(words[_HEAD_WORDS + num_counts :], self._num_engines)

    def forget_process(self, process: int) -> None:
        """Zero the counts of a process that has ended, or that begins."""
        first = self._at(process, 0)
        for at in range(first, first + self._num_engines * _COUNTS):
            self._counts[at] = 0

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """See RoutingState."""
        return keyed_block_names(self._key, scope, prompt)

    def add(self, number: int, more: OpenCounts) -> None:
        """See RoutingState."""
        first = self._at(self._process, number)
        for at, count in enumerate(more, first):
            self._counts[at] += count

    def counts(self, number: int) -> OpenCounts:
        """See RoutingState."""
        first, each = self._at(0, number), self._num_engines * _COUNTS
        return OpenCounts(
            *(sum(self._counts[at::each].tolist()) for at in range(first, first + _COUNTS))
        )

    def _at(self, process: int, number: int) -> int:
        return (process * self._num_engines + number) * _COUNTS
