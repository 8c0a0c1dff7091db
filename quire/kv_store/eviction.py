"""Eviction: keep a store directory below its size, with other processes that do the same.

What lies in the directory is the only record, because others write there too. It is looked through
after this process has written a share of the limit, or half a minute after it wrote: the files not
used for longest are removed until a tenth is free. One process does so at a time; a second one
that cannot get the lock leaves it to the first. Also removes what writers that were killed left.
Knows no entries. Always holds: each writing process may exceed the limit by one share, which is
1/32 of it, or by one file if that is larger, and by what it writes while another one looks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from quire.kv_store.directory_files import (
    ABSENT,
    BLOCKS,
    CLAIMS,
    NAME,
    PARTIAL,
    SHARD,
    StoreFiles,
)
from quire.kv_store.shared_store import CLAIM_LEASE_S

SHARES = 32
LOOK_AGAIN_S = 30.0
KEPT = 0.9
# A partial file that was not written for so long has no writer any more.
PARTIAL_NS = 120 * 10**9
_CLAIM_NS = round(10 * CLAIM_LEASE_S * 1e9)
_PAGE = 4096


def file_bytes(size: int) -> int:
    """Return the room that a file of so many bytes takes."""
    return -(-size // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    shard: str
    name: str


class Eviction:
    """The eviction by one process. Not thread-safe, except for `now_ns`."""

    def __init__(self, files: StoreFiles, max_bytes: int) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._written = max_bytes  # since the last look; so the first entry makes one
        self._looked_s = 0.0
        self._offset_ns = 0  # from this machine's clock to the directory's

    def now_ns(self) -> int:
        """Return the directory's time, as of its last look through."""
        return time.time_ns() + self._offset_ns

    def before(self, size: int) -> None:
        """Make room for a file of this size, if it is time to look."""
        size = file_bytes(size)
        share = self._max_bytes // SHARES
        is_due = self._written and time.monotonic() - self._looked_s >= LOOK_AGAIN_S
        if self._written + size > share or is_due:
            self._look(self._max_bytes - size)
        self._written += size

    def shrink(self) -> None:
        """Remove a tenth: the disk is full, whatever the limit is."""
        self._look(self._max_bytes, beyond=KEPT)

    def _look(self, limit: int, beyond: float | None = None) -> None:
        """Look through the directory, and evict what is more than `limit`.

        beyond: the share of what there is that may stay.
        """
        lock = self._files.lock()
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # another process is at it
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            os.utime(lock)
            now_ns = os.fstat(lock).st_mtime_ns
            self._offset_ns = now_ns - time.time_ns()
            self._written, self._looked_s = 0, time.monotonic()
            left = self._sweep(PARTIAL, now_ns - PARTIAL_NS)
            self._sweep(CLAIMS, now_ns - _CLAIM_NS)
            self._evict(left, limit, beyond)
        finally:
            os.close(lock)

    def _evict(self, partial_bytes: int, limit: int, beyond: float | None) -> None:
        files = list(self._entries())
        total = partial_bytes + sum(one.num_bytes for one in files)
        if beyond is not None:
            limit = min(limit, int(total * beyond))
        if total > limit:
            target = int(limit * KEPT)
            files.sort(key=lambda one: one.used_ns)
            for one in files:
                if total <= target:
                    break
                self._remove(one)
                total -= one.num_bytes

    def _entries(self) -> Iterator[_File]:
        with self._files.open_folder(BLOCKS, make=True) as blocks:
            shards = [name for name in os.listdir(blocks) if SHARD.fullmatch(name)]
        for shard in shards:
            try:
                with self._files.open_folder(BLOCKS, shard) as folder:
                    for name, found in _regular_files(folder):
                        if NAME.fullmatch(name):
                            yield _File(found.st_mtime_ns, file_bytes(found.st_size), shard, name)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise

    def _remove(self, file: _File) -> None:
        with (
            suppress(FileNotFoundError),  # another process removed it
            self._files.open_folder(BLOCKS, file.shard) as folder,
        ):
            os.unlink(file.name, dir_fd=folder)

    def _sweep(self, name: str, before_ns: int) -> int:
        """Remove files older than that; return the bytes of the others."""
        left = 0
        with self._files.open_folder(name, make=True) as folder:
            for file, found in _regular_files(folder):
                if found.st_mtime_ns >= before_ns:
                    left += file_bytes(found.st_size)
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
        return left


def _regular_files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir(folder):
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield name, found
