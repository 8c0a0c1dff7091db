"""Standard output that cannot be written: a full disk, or a reader that went away.

Python keeps what could not be written and tries again at exit, loudly. Knows two file descriptors
and nothing of what was to be said.
"""

from __future__ import annotations

import os
import sys


def lose_output() -> None:
    """Send standard output, and what of it waits in buffers, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.stdout.flush()
