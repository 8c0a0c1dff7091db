"""Log: one event a line, its fields after it, units in the fields' names.

    2026-01-31T12:00:00.123Z info engine: ready model=box num_blocks=512 took_ms=310

What is not printable is written as an escape, wherever it stands, so an event is always one line;
under the form json it is an object of JSON. A line is written by one call, so lines of several
processes on one stream do not mix. A line that cannot be written (a full disk, a closed pipe) is
lost. Level, form and writer of a process are set by log_process.py; without it lines are text and
go straight to standard error.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TextIO

from quire.base.log_sink import LineWriter
from quire.base.report import Field

# In increasing severity.
LEVELS = ("debug", "info", "warning", "error")
USUAL_LEVEL = "info"
# Most values: printable ASCII but for a space, '"' and "=".
_PLAIN = re.compile("[!#-<>-~]+")

# This process's; start_logging sets them.
process_level = USUAL_LEVEL
process_form = "text"
process_writer: LineWriter | None = None


class Log:
    """Writes events of one component to `stream`, by default where the process logs.

    level: events below it are not written; the process's where it is not set.
    """

    def __init__(self, component: str, stream: TextIO | None = None) -> None:
        self.component = component
        self._level: str | None = None
        self._stream = stream

    @property
    def level(self) -> str:
        """The least severe level that is written."""
        return self._level or process_level

    @level.setter
    def level(self, level: str) -> None:
        self._level = level

    def event(self, what: str, **fields: Field) -> None:
        """Something happened as it should."""
        self.write("info", what, fields)

    def debug(self, what: str, **fields: Field) -> None:
        """Log an event that only helps to find a fault."""
        self.write("debug", what, fields)

    def event_as_json(
        self, what: str, fields: Mapping[str, Field], *, level: str = USUAL_LEVEL
    ) -> None:
        """As `event`, as an object of JSON: for programs that read lines."""
        if self._writes(level):
            self._put(self._json(level, what, fields))

    def warning(self, what: str, **fields: Field) -> None:
        """Something is not as it should be, and the work goes on."""
        self.write("warning", what, fields)

    def error(self, what: str, **fields: Field) -> None:
        """Something failed."""
        self.write("error", what, fields)

    def _writes(self, level: str) -> bool:
        return LEVELS.index(level) >= LEVELS.index(self.level)

    def write(self, level: str, what: str, fields: Mapping[str, Field]) -> None:
        """Write an event of this level."""
        if self._writes(level):
            self._put(self.line(level, what, fields))

    def printed(self, text: str) -> None:
        """Write a line that was printed to standard error: as it is, or as JSON."""
        self._put(text if process_form == "text" else self._json("error", text, {}))

    def line(self, level: str, what: str, fields: Mapping[str, Field]) -> str:
        """Return an event as it is written."""
        if process_form == "json":
            return self._json(level, what, fields)
        parts = [f"{_stamp()} {level} {self.component}: {_escaped(what)}"]
        parts += [f"{name}={_show(value)}" for name, value in fields.items()]
        return " ".join(parts)

    def _json(self, level: str, what: str, fields: Mapping[str, Field]) -> str:
        line = {"time": _stamp(), "level": level, "component": self.component, "event": what}
        return json.dumps({**line, **fields})

    def _put(self, line: str) -> None:
        if self._stream is None and process_writer is not None:
            process_writer.write(line)
            return
        stream = sys.stderr if self._stream is None else self._stream
        with suppress(OSError):
            stream.write(line + "\n")
            stream.flush()


def _stamp() -> str:
    now_ms = int(time.time() * 1000)
    return f"{_second(now_ms // 1000)}.{now_ms % 1000:03d}Z"


@lru_cache(maxsize=2)
def _second(now_s: int) -> str:
    """Return a second written out; many lines have the same."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))


def _show(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    plain = text != "" and text.isprintable() and not any(c in text for c in ' ="')
    return text if plain else _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return the text without line breaks, terminal controls and what no encoding can write."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
