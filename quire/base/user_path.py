"""Expand a path that a user wrote."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """Return a path with ~ and ~USER expanded; as it is where there is no such user."""
    return Path(os.path.expanduser(text))
