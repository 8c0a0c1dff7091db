"""Folders and files that decide about answers must be their owner's alone.

What is read back from disk without being computed again (packed weights, keys and values) could
change a model's answers unseen; digests find accidents, not intent. Knows no content.
"""

from __future__ import annotations

import os
import stat


def danger(found: os.stat_result) -> str:
    """Describe the other users that may write there; empty for none."""
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({found.st_uid})"
    if found.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""
