"""Errors of the files that a training writes: what could not be written, and what to do.

Knows no contents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.base.errors import SettingError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise SettingError in place of the OSError of a file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{path}: cannot be written: {error.strerror or error}; free space there, allow "
            "writing or move what is in the way, and run the same command again: it continues from "
            "the texts and the last checkpoint; or give another --out"
        ) from error


def make_out(out: Path) -> None:
    """Make the directory of a training. Raises SettingError where nothing can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"--out {out}: no directory can be made there: {error.strerror or error}; give another"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise SettingError(
            f"--out {out}: no file can be made there; allow writing, or give another directory"
        )
