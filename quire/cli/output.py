"""Handle standard output that cannot be written: a full disk, or a closed pipe.

Python keeps unwritten output and retries at exit, which prints a traceback.
"""

from __future__ import annotations

import os
import sys


def discard_output() -> None:
    """Redirect standard output, buffered text included, to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.stdout.flush()
