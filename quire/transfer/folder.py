"""TierFolder: the directory of a disk tier, locked by one process.

    quire-tier.lock     locked by the process that uses the directory; contains its process id
    quire-tier.key      MAGIC and 16 secret bytes, the key of all block digests
                        (quire.cache.chain): with another key no block is found again
    quire-tier-0000.kv  KV blocks (disk.py)

Knows no blocks. Always holds: nothing is written into a directory that contains files of other
programs; a file with one of these names but foreign content is left unchanged.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.file_ownership import danger

MAGIC = b"QuireKey"
KEY_BYTES = 16
LOCK, KEY = "quire-tier.lock", "quire-tier.key"
_OURS = re.compile(r"quire-tier(\.lock|\.key|\.key\.partial|-\d+\.kv|-\d+\.partial)")
_OF_THE_DISK = frozenset({"lost+found"})  # at the top of a disk that is all a tier's
_MAX_NAMED = 3
_MAX_LOCK_BYTES = 32
_CLOSED = -1  # in place of a descriptor


class TierFolder:
    """A tier directory, locked for this process until `close`.

    hash_key: the persistent key of block digests. note: a warning for the operator, or "".
    Raises SettingError where the directory contains foreign files, is in use by another process,
    writable by other users, or read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.note = _checked(path)
            self._lock = _locked(path)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            self.hash_key = _key(path / KEY)
        except OSError as error:
            os.close(self._lock)
            raise unusable(path, error) from error
        except SettingError:
            os.close(self._lock)
            raise

    def check_room(self, max_bytes: int) -> None:
        """Raise SettingError where the tier's limit exceeds the free space of its disk."""
        try:
            disk = os.statvfs(self.path)
            own = sum(file.stat().st_size for file in segment_files(self.path))
        except OSError as error:
            raise unusable(self.path, error) from error
        free = disk.f_bavail * disk.f_frsize
        if max_bytes > free + own:
            raise SettingError(
                f"kv_tier_bytes is {max_bytes} ({_gib(max_bytes)}); the disk of {self.path} has "
                f"{_gib(free)} free{f' and {_gib(own)} the tier has already' if own else ''}: give "
                f"at most {(free + own) >> 20}MiB (--kv-tier-size), or a folder on a larger disk"
            )

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        lock, self._lock = self._lock, _CLOSED
        if lock != _CLOSED:
            os.close(lock)


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"quire-tier-{number:04d}.kv"


def segment_files(folder: Path) -> dict[Path, int]:
    """Return the existing segments with their numbers, in order."""
    found = {file: file.stem.removeprefix("quire-tier-") for file in folder.glob("quire-tier-*.kv")}
    return {file: int(found[file]) for file in sorted(found) if found[file].isdigit()}


def tier_files(folder: Path) -> list[Path]:
    """Return the files of the tier in a directory; empty if it has none, or foreign files too."""
    if not (folder / KEY).is_file():
        return []
    files = [file for file in sorted(folder.iterdir()) if file.name not in _OF_THE_DISK]
    return files if all(_OURS.fullmatch(file.name) for file in files) else []


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def unusable(folder: Path, error: OSError) -> SettingError:
    """Return the SettingError for an OSError of the tier's disk."""
    return SettingError(
        f"kv_tier_path: {folder} cannot be used as a tier: {error.strerror or error}; name a "
        "folder you may write to, on a disk with room"
    )


def _checked(folder: Path) -> str:
    """Return a warning about the directory, or ""; raise SettingError where it cannot be used."""
    mode = folder.stat()
    if why := danger(mode):
        raise SettingError(
            f"kv_tier_path: {folder}: {why}, able to change a model's answers unseen; take a "
            "folder of your own, or chmod 700 it"
        )
    strange = sorted(
        name
        for name in os.listdir(folder)
        if name not in _OF_THE_DISK and not _OURS.fullmatch(name)
    )
    if strange:
        named = ", ".join(strange[:_MAX_NAMED])
        more = f" and {len(strange) - _MAX_NAMED} more" if len(strange) > _MAX_NAMED else ""
        raise SettingError(
            f"kv_tier_path: {folder} holds {named}{more}, which no tier makes; a tier needs a "
            "folder of its own: name an empty one, or one that is not there yet"
        )
    if mode.st_mode & 0o055:
        return f"others may look into it (mode {stat.S_IMODE(mode.st_mode):o}): chmod 700 it"
    return ""


def _locked(folder: Path) -> int:
    """Return the descriptor of the lock file, locked."""
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        content = os.pread(descriptor, _MAX_LOCK_BYTES, 0)
        if content and not re.fullmatch(rb"\d+\n", content):
            raise _not_ours(path)
        _lock(descriptor, folder, content.decode("ascii").strip() or "unknown")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except (OSError, SettingError):
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, folder: Path, holder: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise SettingError(
            f"kv_tier_path: {folder} is in use by another engine (process {holder}); give each "
            "engine a folder of its own"
        ) from error


def _key(path: Path) -> bytes:
    """Return the directory's key; make a new one where it is missing, truncated or not secret."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _new_key(path)
    try:
        mode = os.fstat(descriptor).st_mode
        content = os.read(descriptor, len(MAGIC) + KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if not content.startswith(MAGIC):
        raise _not_ours(path)
    key = content[len(MAGIC) :]
    return key if len(key) == KEY_BYTES and not mode & 0o077 else _new_key(path)


def _new_key(path: Path) -> bytes:
    key, partial = secrets.token_bytes(KEY_BYTES), path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(partial, flags, 0o600)
    try:
        os.write(descriptor, MAGIC + key)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(partial, path)
    return key


def _not_ours(path: Path) -> SettingError:
    return SettingError(
        f"kv_tier_path: {path} is not what a tier writes under this name; it is left as it is: "
        "delete it if it is not needed (what the tier holds is computed again), or name another "
        "folder"
    )
