"""Files that an engine writes from its start on, each under a name of its own.

Knows no contents. Always holds: a file that exists is neither overwritten nor followed to another
place, so a restart with the same flags keeps what the last start wrote.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quire.base.errors import SettingError

# Files of one name: the first, and those with a number.
MAX_FILES = 1000


def open_new(path: Path, flag: str) -> tuple[int, Path]:
    """Return the descriptor of a new file for `flag`, and its path. Raises SettingError.

    Where a file of an earlier start has the name, the next number is added, as in trace-1.json.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in range(MAX_FILES):
        numbered = path.parent / (f"{path.stem}-{number}{path.suffix}" if number else path.name)
        try:
            return os.open(numbered, flags, 0o600), numbered
        except FileExistsError as error:
            if not _is_regular(numbered):
                raise SettingError(
                    f"{flag} {numbered} exists and is not a regular file; name a new file"
                ) from error
        except OSError as error:
            raise SettingError(
                f"{flag} {path} cannot be written: {error.strerror}; name a file in a directory "
                "that exists and is yours"
            ) from error
    raise SettingError(
        f"{flag} {path} exists, with the numbers up to {MAX_FILES - 1}; remove old files, or name "
        "another"
    )


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:  # removed meanwhile
        return True
