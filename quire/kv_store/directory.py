"""DirectoryStore: a SharedStore in a directory, which several machines may mount.

A value is a file. It is written under a drawn name and renamed when it is complete, so that a
reader sees all of it or none; nothing is synchronized to the disk, so that after a crash of a
machine files may be cut, which their seal shows. Reading marks a file as used; what was not used
for longest is evicted (eviction.py). A claim is a file too, alive while it is touched. Knows no
blocks. Always holds: an entry that disappears while it is read is whole or missing.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from quire.base.file_ownership import danger
from quire.kv_store.directory_files import (
    ABSENT,
    BLOCKS,
    CLAIMS,
    NAME,
    PARTIAL,
    READ,
    StoreFiles,
)
from quire.kv_store.eviction import Eviction, file_bytes
from quire.kv_store.shared_store import CLAIM_LEASE_S, MAX_CLAIM_BYTES, Parts

# A file that was used within this time is not marked again: a mark is a write.
USED_AGAIN_NS = 30 * 10**9
# Where engines claim so much at once, further claims are not seen, and computed twice.
MAX_CLAIMS = 256
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A directory has the name of an entry; it stays, and the entry is not stored.
_FOREIGN = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DirectoryStore:
    """A SharedStore (see there) of about max_bytes, in the directory of `files`."""

    def __init__(self, files: StoreFiles, *, max_bytes: int) -> None:
        self._files = files
        self._eviction = Eviction(files, max_bytes)
        self._max_bytes = max_bytes
        self._putting = threading.Lock()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._files.path

    @property
    def can_write(self) -> bool:
        """Whether entries can be stored."""
        return self._files.can_write

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See SharedStore."""
        return [self._size(key) is not None for key in keys]

    def get(self, keys: Sequence[bytes], rooms: Sequence[Parts]) -> list[int | None]:
        """See SharedStore."""
        return [self._read(key, room) for key, room in zip(keys, rooms, strict=True)]

    def put(self, keys: Sequence[bytes], values: Sequence[Parts]) -> list[bool]:
        """See SharedStore."""
        return [self._write(key, value) for key, value in zip(keys, values, strict=True)]

    def remove(self, key: bytes) -> None:
        """See SharedStore."""
        name = key.hex()
        try:
            with self._files.open_folder(BLOCKS, name[:2]) as shard:
                os.unlink(name, dir_fd=shard)
        except OSError as error:
            if error.errno not in (*ABSENT, errno.EROFS, *_FOREIGN):
                raise

    def claim(self, key: bytes, record: bytes) -> bool:
        """See SharedStore."""
        if not self.can_write:
            return False
        name = key.hex()
        with (
            self._files.open_folder(PARTIAL, make=True) as partial,
            self._files.open_folder(CLAIMS, make=True) as claims,
        ):
            written = self._files.write(partial, [memoryview(record[:MAX_CLAIM_BYTES])])
            try:
                for _ in range(2):
                    if _link(written, partial, name, claims):
                        return True
                    if self._is_alive(claims, name):
                        return False
                    _unlink(name, claims)
            finally:
                _unlink(written, partial)
        return False

    def claims(self, keys: Sequence[bytes]) -> list[bytes]:
        """See SharedStore: of all keys."""
        try:
            with self._files.open_folder(CLAIMS) as claims:
                names = [name for name in os.listdir(claims) if NAME.fullmatch(name)][:MAX_CLAIMS]
                found = [_claim(claims, name) for name in names]
        except FileNotFoundError:
            return []
        if not any(found):
            return []
        now_ns = self._files.now_ns() if self.can_write else None
        return [
            one[0]
            for one in found
            if one is not None and (now_ns is None or _is_fresh(one, now_ns))
        ]

    def renew(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        with suppress(FileNotFoundError), self._files.open_folder(CLAIMS) as claims:
            found = _claim(claims, key.hex())
            if found is not None and found[0] == record:
                os.utime(key.hex(), dir_fd=claims, follow_symlinks=False)

    def release(self, key: bytes, record: bytes) -> None:
        """See SharedStore."""
        with suppress(FileNotFoundError), self._files.open_folder(CLAIMS) as claims:
            found = _claim(claims, key.hex())
            if found is not None and found[0] == record:
                _unlink(key.hex(), claims)

    def close(self) -> None:
        """Close the directory."""
        self._files.close()

    def _size(self, key: bytes) -> int | None:
        """Return the size of an entry; None if there is none, or something else in its place."""
        name = key.hex()
        try:
            with self._files.open_folder(BLOCKS, name[:2]) as shard:
                found = os.stat(name, dir_fd=shard, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _read(self, key: bytes, room: Parts) -> int | None:
        name = key.hex()
        try:
            with self._files.open_folder(BLOCKS, name[:2]) as shard:
                descriptor = os.open(name, READ, dir_fd=shard)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            wanted = sum(map(len, room))
            if found.st_size != wanted or danger(found):
                return -1 if found.st_size == wanted else found.st_size
            size = _read_all(descriptor, room)
            if size == wanted:
                self._mark_used(descriptor, found)
            return size
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        finally:
            os.close(descriptor)

    def _write(self, key: bytes, value: Parts) -> bool:
        size = sum(map(len, value))
        if not self.can_write or file_bytes(size) > self._max_bytes:
            return False
        if self._size(key) == size:
            self._mark_put(key.hex())
            return True
        try:
            with self._putting:
                self._eviction.before(size)
            try:
                self._write_file(key.hex(), value)
            except FileNotFoundError:  # its directories were removed meanwhile
                self._write_file(key.hex(), value)
        except OSError as error:
            if error.errno in (errno.EROFS, *_FOREIGN):
                return False
            if error.errno not in _FULL:
                raise
            with self._putting:
                self._eviction.shrink()
            return False
        return True

    def _write_file(self, name: str, value: Parts) -> None:
        with self._files.open_folder(PARTIAL, make=True) as partial:
            written = self._files.write(partial, list(value))
            try:
                with self._files.open_folder(BLOCKS, name[:2], make=True) as shard:
                    os.rename(written, name, src_dir_fd=partial, dst_dir_fd=shard)
            except OSError:
                _unlink(written, partial)
                raise

    def _mark_used(self, descriptor: int, found: os.stat_result) -> None:
        """Make a file's time that of now, as far as this file system lets us."""
        try:
            if self.can_write and self._eviction.now_ns() - found.st_mtime_ns > USED_AGAIN_NS:
                os.utime(descriptor)
        except OSError:
            pass  # it is evicted earlier than it should be

    def _mark_put(self, name: str) -> None:
        """Mark an entry as used because another engine put it again."""
        with suppress(OSError), self._files.open_folder(BLOCKS, name[:2]) as shard:
            found = os.stat(name, dir_fd=shard, follow_symlinks=False)
            if self._eviction.now_ns() - found.st_mtime_ns > USED_AGAIN_NS:
                os.utime(name, dir_fd=shard, follow_symlinks=False)

    def _is_alive(self, claims: int, name: str) -> bool:
        found = _claim(claims, name)
        if found is None:
            return False
        return _is_fresh(found, self._files.now_ns())


def _is_fresh(claim: tuple[bytes, int], now_ns: int) -> bool:
    """Return whether a claim was renewed a while ago, by the clock of the file system.

    One from the future was made before the clock was set back, and is as good as dead.
    """
    return abs(now_ns - claim[1]) <= round(CLAIM_LEASE_S * 1e9)


def _link(written: str, partial: int, name: str, claims: int) -> bool:
    """Give a claim its name; return False where there is one of that name."""
    try:
        os.link(written, name, src_dir_fd=partial, dst_dir_fd=claims, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Two may claim at the same time, and both compute.
        if _claim(claims, name) is not None:
            return False
        os.rename(written, name, src_dir_fd=partial, dst_dir_fd=claims)
    return True


def _claim(folder: int, name: str) -> tuple[bytes, int] | None:
    """Return the record of a claim and when it was renewed; None where there is none."""
    try:
        descriptor = os.open(name, READ, dir_fd=folder)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or danger(found):
            return None
        return os.read(descriptor, MAX_CLAIM_BYTES), found.st_mtime_ns
    finally:
        os.close(descriptor)


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _read_all(descriptor: int, room: Parts) -> int:
    """Fill the parts of a room; return how many bytes there were."""
    left, done = list(room), 0
    while left:
        count = os.readv(descriptor, left)
        if not count:
            return done
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done
