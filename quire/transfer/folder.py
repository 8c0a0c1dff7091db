"""TierFolder: a folder that a tier may use, told from one that holds anything of anybody else's.

    quire-tier.lock     held by the process that uses the folder; it says which
    quire-tier.key      MAGIC and 16 secret bytes of which digests are made (quire.cache.digest):
                        with another key nothing would be found again
    quire-tier-0000.kv  blocks (disk.py)

Knows no blocks. Always holds: nothing is written into a folder in which there is a file that no
tier makes; a file of one of these names whose content no tier writes is left as it is.
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
_MOST_NAMED = 3
_MOST_LOCK_BYTES = 32


class TierFolder:
    """A folder that is this process's alone until it is closed. hash_key: kept from run to run.
    note: what whoever runs it should know; empty for nothing.

    Raises SettingError where it cannot be used: it holds others' files, is in use, open to others'
    writing, or read-only.
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
        """Raise SettingError where the disk has less than a tier may take: it would fill up."""
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
        """Let others use it."""
        os.close(self._lock)


def segment_path(folder: Path, number: int) -> Path:
    """Where a file of blocks lies."""
    return folder / f"quire-tier-{number:04d}.kv"


def segment_files(folder: Path) -> dict[Path, int]:
    """The files of blocks that are there, with their numbers."""
    found = {file: file.stem.removeprefix("quire-tier-") for file in folder.glob("quire-tier-*.kv")}
    return {file: int(found[file]) for file in sorted(found) if found[file].isdigit()}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def unusable(folder: Path, error: OSError) -> SettingError:
    """The error for what a disk said."""
    return SettingError(
        f"kv_tier_path: {folder} cannot be used as a tier: {error.strerror or error}; name a "
        "folder you may write to, on a disk with room"
    )


def _checked(folder: Path) -> str:
    """What should be known of a folder that may be a tier; SettingError where it may not."""
    mode = folder.stat()
    if why := danger(mode):
        raise SettingError(
            f"kv_tier_path: {folder}: {why}, who could change a model's answers unseen; take a "
            "folder of your own, or chmod 700 it"
        )
    strange = sorted(
        name
        for name in os.listdir(folder)
        if name not in _OF_THE_DISK and not _OURS.fullmatch(name)
    )
    if strange:
        named = ", ".join(strange[:_MOST_NAMED])
        more = f" and {len(strange) - _MOST_NAMED} more" if len(strange) > _MOST_NAMED else ""
        raise SettingError(
            f"kv_tier_path: {folder} holds {named}{more}, which no tier makes; a tier needs a "
            "folder of its own: name an empty one, or one that is not there yet"
        )
    if mode.st_mode & 0o055:
        return f"others may look into it (mode {stat.S_IMODE(mode.st_mode):o}): chmod 700 it"
    return ""


def _locked(folder: Path) -> int:
    """The folder's lock, open and held."""
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        said = os.pread(descriptor, _MOST_LOCK_BYTES, 0)
        if said and not re.fullmatch(rb"\d+\n", said):
            raise _not_ours(path)
        _lock(descriptor, folder, said.decode("ascii").strip() or "unknown")
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
    """The folder's key; made where there is none, or one of ours that is not whole and secret."""
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
        "delete it if nobody needs it (what the tier holds is computed again), or name another "
        "folder"
    )
