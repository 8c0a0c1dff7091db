"""SocketDirectory: a temporary directory for the sockets of one engine process.

Only this user can enter it. A lock file in it is held for as long as its server lives, however it
ends; the next start removes directories with a free lock, which killed servers left.
Imports the standard library and the error tree only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from quire.base.errors import SettingError

PREFIX = "quire-engine-"
LOCK_FILE = "lock"
# The address of a socket has at most 107 bytes; PREFIX, 8 letters and a socket's name follow.
_MAX_PARENT_BYTES = 64
_MAX_TRIES = 10


class SocketDirectory:
    """A new directory. Raises SettingError where none can be made."""

    def __init__(self) -> None:
        parent = _parent()
        remove_abandoned(parent)
        for _ in range(_MAX_TRIES):
            try:
                self.path, self._lock = _make(parent)
            except OSError as error:  # no descriptor or room is left, or it cannot be written to
                raise SettingError(
                    f"no directory for sockets can be made in {parent}: {error.strerror}; set "
                    "TMPDIR to one that can be written to, with a path of at most "
                    f"{_MAX_PARENT_BYTES} bytes"
                ) from error
            if self._lock is not None:
                return
        raise SettingError(
            f"no directory for sockets stays in {parent}: something removes each at once; set "
            "TMPDIR to another directory"
        )

    @property
    def is_there(self) -> bool:
        """Whether it still has its lock file: a service of the system may remove old files."""
        return self._lock is not None and os.fstat(self._lock).st_nlink > 0

    def remove(self) -> None:
        """Remove the directory with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> None:
    """Remove this user's directories in `parent` that belong to servers no longer running."""
    directories: list[Path] = []
    with contextlib.suppress(OSError):  # no descriptor is left; the next start removes them
        directories = list(parent.glob(f"{PREFIX}*"))
    for directory in directories:
        with contextlib.suppress(OSError):  # it is another user's, in use, or gone already
            if directory.lstat().st_uid != os.geteuid():
                continue
            with (directory / LOCK_FILE).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)


def _parent() -> Path:
    try:
        parent = Path(tempfile.gettempdir())
    except OSError as error:
        raise SettingError(
            f"no directory for sockets can be made: {error.strerror or error}; set TMPDIR to a "
            f"directory that can be written to, with a path of at most {_MAX_PARENT_BYTES} bytes"
        ) from error
    return parent if len(os.fsencode(parent)) <= _MAX_PARENT_BYTES else Path("/tmp")


def _make(parent: Path) -> tuple[Path, int | None]:
    """Make a directory and hold its lock (see _hold). Raises OSError, leaving none."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        return path, _hold(path / LOCK_FILE)
    except OSError:
        path.rmdir()  # which, unlike rmtree, needs no descriptor
        raise


def _hold(file: Path) -> int | None:
    """Make the lock file and hold its lock; None where another start has just removed it.

    Where the file system knows no locks, none is held, and no start can take it either.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.fstat(descriptor).st_nlink > 0
    except OSError as error:
        is_ours = not isinstance(error, BlockingIOError)
    if is_ours:
        return descriptor
    os.close(descriptor)
    return None
