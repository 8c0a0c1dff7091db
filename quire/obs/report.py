"""How something that takes a while tells what it does, and what came out: progress, a table, JSON.

Progress goes to standard error and only to a terminal; standard output holds the table, or with
--json the object and nothing else. Knows no measurement.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO


class Progress:
    """A line on the terminal that is written over; silent where standard error is none."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()

    def say(self, text: str) -> None:
        """Show what is going on now."""
        if self._shown:
            self._stream.write(f"\r\033[K{text}")
            self._stream.flush()

    def clear(self) -> None:
        """Leave the line empty."""
        self.say("")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their headings, the first aligned left and the others right."""
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
    """Print one of the two."""
    print(json.dumps(outcome) if as_json else text)
