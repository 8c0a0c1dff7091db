"""Expand a path that a user wrote: on the command line, in a file of settings or in a variable.

Touches no file. A `~NAME` without such a user stays as it is, so that the error raised on opening
the path names what was written.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return a path with ~ and ~USER expanded; as it is where there is no such user."""
    return Path(os.path.expanduser(text))
