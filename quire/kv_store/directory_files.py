"""The files of a store directory: opened by name only, never through a link.

    quire-store.key   MAGIC and 16 secret bytes, the key of all block digests (quire.cache.chain)
    quire-store.lock  locked by the process that evicts; its time is the clock of the directory
    blocks/XX/NAME    an entry each; NAME is its key in hexadecimal, XX how it begins
    claims/NAME       claims
    partial/*         entries that are being written

Knows no entries. Always holds: each directory below the first is opened without following links
and belongs to this user alone; names are made of keys, never of what a file says.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.file_ownership import danger

MAGIC = b"QuireSKy"
HASH_KEY_BYTES = 16
KEY, LOCK = "quire-store.key", "quire-store.lock"
BLOCKS, CLAIMS, PARTIAL = "blocks", "claims", "partial"
_OURS = frozenset({KEY, LOCK, BLOCKS, CLAIMS, PARTIAL})
_OF_THE_DISK = frozenset({"lost+found"})
_MAX_NAMED = 3
_KEY_LOOKS, _KEY_PAUSE_S = 20, 0.05
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
SHARD = re.compile(r"[0-9a-f]{2}")
NAME = re.compile(r"[0-9a-f]{32}")
# What is missing, is no file of ours, or was removed by another machine while it was open.
ABSENT = (errno.ENOENT, errno.ESTALE, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class StoreFiles:
    """A store directory, made if it is missing.

    hash_key: of block digests. can_write: False on a read-only file system. Raises SettingError
    where it holds foreign files, is not this user's alone, or cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            _check(path, self._root)
            self.can_write = self._is_writable()
            self.hash_key = self._key()
            for name in (BLOCKS, CLAIMS, PARTIAL) if self.can_write else ():
                with self.open_folder(name, make=True):
                    pass
        except OSError as error:
            os.close(self._root)
            raise _unusable(path, error) from error
        except SettingError:
            os.close(self._root)
            raise

    @contextmanager
    def open_folder(self, *names: str, make: bool = False) -> Iterator[int]:
        """Open a directory below the first, step by step; make: the missing ones are made."""
        opened, descriptor = [], self._root
        try:
            for name in names:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=descriptor)
                descriptor = os.open(name, _DIRECTORY, dir_fd=descriptor)
                opened.append(descriptor)
                if why := danger(os.fstat(descriptor)):
                    raise OSError(errno.EACCES, f"{'/'.join(names)}: {why}")
            yield descriptor
        finally:
            for one in opened:
                os.close(one)

    def write(self, folder: int, parts: list[memoryview]) -> str:
        """Write a new file with a drawn name; return the name. Raises OSError, leaving none."""
        name = secrets.token_hex(16)
        descriptor = os.open(name, CREATE, 0o600, dir_fd=folder)
        try:
            _write_all(descriptor, parts)
        except OSError:
            os.close(descriptor)
            os.unlink(name, dir_fd=folder)
            raise
        os.close(descriptor)  # a file system may report here that it is full
        return name

    def lock(self) -> int:
        """Open the lock file; the caller closes it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(LOCK, flags, 0o600, dir_fd=self._root)

    def now_ns(self) -> int:
        """Return the time of the file system, which all machines that share it agree on."""
        descriptor = self.lock()
        try:
            os.utime(descriptor)
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._root)

    def _is_writable(self) -> bool:
        try:
            os.close(self.lock())
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return False
        return True

    def _key(self) -> bytes:
        """Return the directory's key; make one where there is none."""
        for _ in range(_KEY_LOOKS):
            try:
                descriptor = os.open(KEY, READ, dir_fd=self._root)
            except FileNotFoundError:
                if not self.can_write:
                    raise SettingError(
                        f"kv_store: {self.path} is read-only and holds no store; name a "
                        "directory that an engine has filled, or one you may write to"
                    ) from None
                self._make_key()
                continue
            try:
                found = os.fstat(descriptor)
                content = os.read(descriptor, len(MAGIC) + HASH_KEY_BYTES + 1)
            finally:
                os.close(descriptor)
            if len(content) == len(MAGIC) + HASH_KEY_BYTES and content.startswith(MAGIC):
                if why := danger(found):
                    raise SettingError(f"kv_store: {self.path / KEY}: {why}; delete it")
                if stat.S_IMODE(found.st_mode) & 0o077:
                    raise SettingError(
                        f"kv_store: {self.path / KEY} can be read by others (mode "
                        f"{stat.S_IMODE(found.st_mode):o}); chmod 600 it"
                    )
                return content[len(MAGIC) :]
            if not (MAGIC.startswith(content) or content.startswith(MAGIC)):
                break
            time.sleep(_KEY_PAUSE_S)  # another process may be writing it
        raise SettingError(
            f"kv_store: {self.path / KEY} is not what a store writes under this name; delete it "
            "if it is not needed (what the store holds is computed again), or name another "
            "directory"
        )

    def _make_key(self) -> None:
        try:
            descriptor = os.open(KEY, CREATE, 0o600, dir_fd=self._root)
        except FileExistsError:
            return  # of another process
        try:
            _write_all(descriptor, [memoryview(MAGIC + secrets.token_bytes(HASH_KEY_BYTES))])
        finally:
            os.close(descriptor)


def _check(path: Path, root: int) -> None:
    if why := danger(os.fstat(root)):
        raise SettingError(
            f"kv_store: {path}: {why}, able to change a model's answers unseen; take a directory "
            "of your own, or chmod 700 it"
        )
    strange = sorted(set(os.listdir(root)) - _OURS - _OF_THE_DISK)
    if strange:
        named = ", ".join(strange[:_MAX_NAMED])
        more = f" and {len(strange) - _MAX_NAMED} more" if len(strange) > _MAX_NAMED else ""
        raise SettingError(
            f"kv_store: {path} holds {named}{more}, which no store makes; a store needs a "
            "directory of its own: name an empty one, or one that is not there yet"
        )


def _unusable(path: Path, error: OSError) -> SettingError:
    return SettingError(
        f"kv_store: {path} cannot be used as a store: {error.strerror or error}; name a directory "
        "you may write to, on a file system that all engines share"
    )


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    left = [part.cast("B") for part in parts]
    while left:
        count = os.writev(descriptor, left)
        if not count:
            raise OSError(errno.EIO, "nothing could be written")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
