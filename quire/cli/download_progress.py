"""Show a download's progress.

On a terminal one line is updated; elsewhere, as in a log, one line is written at the end.
"""

from __future__ import annotations

import sys
import time

from quire.hub.gguf_choice import size_text

_PERIOD_S = 0.2


class DownloadProgress:
    """Writes to standard error. model: the name to show."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._file = ""
        self._done = self._total = self._received = 0
        self._is_terminal = sys.stderr.isatty()
        self._begin_s: float | None = None
        self._shown_s = 0.0

    def line(self, text: str) -> None:
        """Write a line."""
        print(text, file=sys.stderr, flush=True)

    def begin(self, file: str, done_bytes: int, total_bytes: int) -> None:
        """Show that a file begins."""
        self._file, self._done, self._total = file, done_bytes, total_bytes
        self._begin_s = self._begin_s or time.monotonic()
        self._show(force=True)

    def advance(self, num_bytes: int) -> None:
        """Count received bytes."""
        self._done += num_bytes
        self._received += num_bytes
        self._show()

    def end(self) -> None:
        """Replace the line by a summary, if anything was downloaded."""
        if self._begin_s is None:
            return
        seconds = max(time.monotonic() - self._begin_s, 1e-3)
        if self._is_terminal:
            sys.stderr.write("\r\033[K")
        self.line(f"received  {size_text(self._received)} of {self._model} in {seconds:.1f} s")
        self._begin_s, self._received = None, 0

    def _show(self, *, force: bool = False) -> None:
        now_s = time.monotonic()
        if not self._is_terminal or self._begin_s is None:
            return
        if not force and now_s - self._shown_s < _PERIOD_S:
            return
        self._shown_s = now_s
        share = 100 * self._done // max(self._total, 1)
        rate = self._received / max(now_s - self._begin_s, 1e-3)
        text = f"{share:3d} % of {size_text(self._total)}, {size_text(int(rate))}/s, {self._file}"
        sys.stderr.write(f"\r\033[K{text[:78]}")
        sys.stderr.flush()
