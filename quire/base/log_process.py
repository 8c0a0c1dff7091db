"""start_logging: everything that this process writes to standard error goes through one LineWriter.

Log lines, what libraries log, warnings, uncaught exceptions and what is printed to `sys.stderr` get
the same form and never block. Knows no component. Always holds: under the form json each line is an
object of JSON.
"""

from __future__ import annotations

import atexit
import io
import logging
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from quire.base import log as log_module
from quire.base.log import USUAL_LEVEL, Log
from quire.base.log_sink import LineWriter, without_blocking_others

# So long a process that ends waits for lines without a reader.
_FLUSH_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How a process logs. level: what is below it is left out."""

    level: str = USUAL_LEVEL
    form: Literal["text", "json"] = "text"


def start_logging(component: str, settings: LogSettings) -> None:
    """Log as `settings` say from now on. component: of lines that belong to no other.

    A program that has replaced `sys.stderr` keeps its own, and only the settings are taken up.
    """
    log_module.process_level, log_module.process_form = settings.level, settings.form
    original = sys.__stderr__
    if original is None or sys.stderr is not original:
        return
    log = Log(component)
    writer = LineWriter(
        without_blocking_others(original.fileno()),
        lambda count: log.line("warning", "log lines were dropped", {"count": count}),
    )
    log_module.process_writer = writer
    atexit.register(writer.close, _FLUSH_S)
    sys.stderr = _LoggedStream(log, original)
    _log_exceptions(log)
    logging.root.handlers = [_LibraryLines()]
    logging.root.setLevel("ERROR" if settings.level == "error" else "WARNING")
    logging.captureWarnings(True)
    warnings.formatwarning = _warning_text


def dropped_lines() -> int:
    """Return how many log lines of this process were dropped."""
    writer = log_module.process_writer
    return 0 if writer is None else writer.num_dropped


class _LoggedStream(io.TextIOBase):
    """Takes the place of `sys.stderr`: each line that is printed becomes one of the log."""

    def __init__(self, log: Log, original: Any) -> None:
        self._log = log
        self._original = original
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The original stream's."""
        return str(self._original.encoding)

    def fileno(self) -> int:
        """Return the original stream's descriptor."""
        return int(self._original.fileno())

    def isatty(self) -> bool:
        """Return whether the original stream is a terminal."""
        return bool(self._original.isatty())

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Log the lines that `text` completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line:
                self._log.printed(line)
        return len(text)


class _LibraryLines(logging.Handler):
    """Passes what libraries log on to a Log of the logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "debug" if record.levelno < logging.INFO else "info"
        level = "warning" if record.levelno >= logging.WARNING else level
        level = "error" if record.levelno >= logging.ERROR else level
        fields = {}
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  a library's own mistake in a format
            text = str(record.msg)
        Log(record.name).write(level, text, fields)


def _log_exceptions(log: Log) -> None:
    def uncaught(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        log.error("uncaught exception", traceback=text)

    sys.excepthook = uncaught
    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _warning_text(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {message}"
