"""LineWriter: writes lines to a descriptor and never blocks its caller.

A pipe without a reader, a stopped terminal or a full socket holds up a thread of the writer's own;
lines that no longer fit its queue are dropped and counted, and once writing goes on a line says how
many. Files and devices are written to at once. Knows no format. Always holds: `write` returns
without waiting; the lines that are written keep their order and are whole.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import stat
import threading
from collections.abc import Callable

MAX_QUEUED_LINES = 1000
# A longer line, such as a deep traceback, is cut.
MAX_LINE_BYTES = 64 * 1024


class LineWriter:
    """Writes to `fd`, which stays open. on_dropped: makes the line that reports `n` lost lines."""

    def __init__(self, fd: int, on_dropped: Callable[[int], str]) -> None:
        self._fd = fd
        self._on_dropped = on_dropped
        self._lock = threading.RLock()  # a finalizer may log while its thread holds it
        self._num_dropped = 0
        self._num_reported = 0
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if _may_block(fd):
            self._thread = threading.Thread(target=self._drain, name="quire-log", daemon=True)
            self._thread.start()

    @property
    def num_dropped(self) -> int:
        """How many lines were dropped."""
        return self._num_dropped

    def write(self, line: str) -> None:
        """Write a line, or queue it to be written; `line` ends without a line break."""
        raw = line.encode(errors="backslashreplace")[:MAX_LINE_BYTES] + b"\n"
        if self._thread is None:
            _write_all(self._fd, raw)
        elif self._lines.qsize() < MAX_QUEUED_LINES:
            self._lines.put(raw)
        else:
            with self._lock:
                self._num_dropped += 1

    def close(self, limit_s: float) -> None:
        """Wait at most `limit_s` until what is queued is written."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(limit_s)

    def _drain(self) -> None:
        while (raw := self._lines.get()) is not None:
            _write_all(self._fd, raw)
            dropped = self._num_dropped - self._num_reported
            if dropped:
                self._num_reported += dropped
                _write_all(self._fd, self._on_dropped(dropped).encode() + b"\n")


def can_write(fd: int) -> bool:
    """Return whether a short write to `fd` would not block."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def without_blocking_others(fd: int) -> int:
    """Return a descriptor for a LineWriter to the same place, and make writes to `fd` itself fail
    where they would block, if it is a pipe.

    Native code and libraries write to standard error directly; one that holds the interpreter lock
    would stop the process until the pipe is read. The pipe is opened anew for both, so that other
    processes that share it still block. Returns `fd` unchanged where that is not possible.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return fd
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        own = os.open(f"/proc/self/fd/{fd}", flags)  # fails if there is no reader
        direct = os.open(f"/proc/self/fd/{fd}", flags)
    except OSError:
        return fd
    os.set_blocking(own, True)
    os.dup2(direct, fd)
    os.close(direct)
    return own


def _may_block(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False  # closed: each write fails at once
    return not stat.S_ISREG(mode) and (not stat.S_ISCHR(mode) or os.isatty(fd))


def _write_all(fd: int, raw: bytes) -> None:
    """Write `raw`; lose it where that fails (a full disk, a closed pipe)."""
    with contextlib.suppress(OSError):
        while raw:
            raw = raw[os.write(fd, raw) :]
