"""Progress of a training: lines on standard error, at most one every few seconds.

Knows no training. Always holds: the last line of something that was counted to its end is printed.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

SECONDS_BETWEEN = 5.0


class Progress:
    """Prints how far something is. seconds_between: 0 prints each time."""

    def __init__(
        self, file: TextIO | None = None, seconds_between: float = SECONDS_BETWEEN
    ) -> None:
        self._file, self._seconds_between = file or sys.stderr, seconds_between
        self._began_s = time.monotonic()
        self._shown_s = -seconds_between

    def show(self, what: str, done: int, total: int, **values: float) -> None:
        """Print a line, unless one was printed just before; the last one is always printed."""
        now_s = time.monotonic() - self._began_s
        if done < total and now_s - self._shown_s < self._seconds_between:
            return
        self._shown_s = now_s
        said = "".join(f"  {name} {value:.4f}" for name, value in values.items())
        print(f"{what}: {done} of {total} ({now_s:.0f} s){said}", file=self._file, flush=True)

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._file, flush=True)
