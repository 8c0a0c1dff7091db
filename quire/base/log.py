"""Log: one event a line, its fields after it, units in the fields' names.

    2026-01-31T12:00:00.123Z info engine: ready model=box num_blocks=512 took_ms=310

What is not printable is written as an escape, wherever it stands, so an event is always one line.
Knows no global logger: a Log is handed to whoever reports. A line is written by one call, so lines
of several processes on one stream do not mix. A line that cannot be written (the disk is full, the
reader went away) is lost: what is reported on goes on.
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

from quire.base.report import Field

# From what is worth the least.
LEVELS = ("debug", "info", "warning", "error")
USUAL_LEVEL = "info"
# Most values: printable ASCII but for a space, '"' and "=".
_PLAIN = re.compile("[!#-<>-~]+")


class Log:
    """Writes events of one component to a text stream (standard error unless told).

    level: what is worth less than this is not written.
    """

    def __init__(self, component: str, stream: TextIO | None = None) -> None:
        self.component = component
        self.level = USUAL_LEVEL
        self._stream = stream

    def event(self, what: str, **fields: Field) -> None:
        """Something happened as it should."""
        self._write("info", what, fields)

    def debug(self, what: str, **fields: Field) -> None:
        """Something that is of use only to whoever looks for a fault."""
        self._write("debug", what, fields)

    def event_as_json(
        self, what: str, fields: Mapping[str, Field], *, level: str = USUAL_LEVEL
    ) -> None:
        """As `event`, as an object of JSON: for programs that read lines."""
        if self._writes(level):
            line = {"time": _stamp(), "level": level, "component": self.component, "event": what}
            self._put(json.dumps({**line, **fields}))

    def warning(self, what: str, **fields: Field) -> None:
        """Something is not as it should be, and the work goes on."""
        self._write("warning", what, fields)

    def error(self, what: str, **fields: Field) -> None:
        """Something failed."""
        self._write("error", what, fields)

    def _writes(self, level: str) -> bool:
        return LEVELS.index(level) >= LEVELS.index(self.level)

    def _write(self, level: str, what: str, fields: dict[str, Field]) -> None:
        if not self._writes(level):
            return
        parts = [f"{_stamp()} {level} {self.component}: {_escaped(what)}"]
        parts += [f"{name}={_show(value)}" for name, value in fields.items()]
        self._put(" ".join(parts))

    def _put(self, line: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        with suppress(OSError):
            stream.write(line + "\n")
            stream.flush()


def _stamp() -> str:
    now_ms = int(time.time() * 1000)
    return f"{_second(now_ms // 1000)}.{now_ms % 1000:03d}Z"


@lru_cache(maxsize=2)
def _second(now_s: int) -> str:
    """A second written out; many lines have the same."""
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
    """The text without line breaks, terminal controls and what no encoding can write."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
