"""Output of long-running commands: progress, tables, JSON.

Progress goes to standard error; standard output has the table, or with --json only the object.
Independent of measurements.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO


class Progress:
    """Progress on standard error: one overwritten line on a terminal, else a line now and then.

    every_s: seconds between lines where the stream is no terminal; the first comes after as many.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every_s: float = 30.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._every_s, self._clock_s = every_s, clock_s
        self._next_s = clock_s() + every_s

    def say(self, text: str) -> None:
        """Show the current state."""
        if self._is_terminal:
            self._stream.write(f"\r\033[K{text}")
        elif (now_s := self._clock_s()) >= self._next_s:
            self._next_s = now_s + self._every_s
            self._stream.write(f"{text}\n")
        else:
            return
        self._stream.flush()

    def clear(self) -> None:
        """Empty the line of a terminal."""
        if self._is_terminal:
            self.say("")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns under their headings, the first aligned left and the others right."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def show(outcome: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the object as JSON, or the text."""
    print(json.dumps(outcome) if as_json else text)
