"""Read files of a model directory, which may hold anything under any name.

A FIFO blocks its reader, a device never ends, and a directory cannot be read: only regular files
(or symbolic links to them) are opened, and no more than a stated number of bytes is read. What is
found instead is the text of an OSError. Knows no content but how a pointer of Git LFS begins.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)
_MORE_BYTES = 1 << 20
# What Git LFS leaves in place of a file that was not fetched begins so.
LFS_POINTER = b"version https://git-lfs"


def is_present(path: Path) -> bool:
    """Return whether the directory has an entry of this name, readable or not, of whatever kind.

    A name too long for the file system is not present.
    """
    try:
        return os.path.lexists(path)
    except OSError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError; its strerror names any other kind."""
    # Without O_NONBLOCK the open itself waits for the writer of a FIFO.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = next((words for matches, words in _KINDS if matches(mode)), "no regular file")
    raise OSError(errno.EINVAL, f"it is {kind}; a regular file must be there", str(path))


def read_regular(path: Path, *, limit_bytes: int) -> bytes:
    """Read a whole regular file. Raises OSError for another kind or for too many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # As many bytes as there are, not as many as may be: that much memory is allocated first.
        content = file.read(size + 1) if size <= limit_bytes else b""
        while content and (left := limit_bytes + 1 - len(content)) > 0:  # it grows, or has no size
            more = file.read(min(left, _MORE_BYTES))
            if not more:
                break
            content += more
    if max(size, len(content)) > limit_bytes:
        found = max(size, len(content))
        message = f"it has {found} bytes; at most {limit_bytes} are allowed"
        raise OSError(errno.EFBIG, message, str(path))
    return content
