"""Run the `quire` command as its users do: in a process, with pipes or at a terminal; or inside.

The process imports the same package as the test that starts it, wherever that is installed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

import quire
from quire.cli.main import main
from tests.serve import preloaded

LIMIT_S = 120.0
# A shell that runs the tests in the background makes them, and their children, ignore Ctrl-C.
_TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, '-m', 'quire', *sys.argv[1:]])"
)


def environment() -> dict[str, str]:
    """Return the test's environment, with its `quire` first on the path."""
    root = str(Path(quire.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "TERM": "dumb", "PYTHONWARNINGS": "error"}


def quire_command(*words: str, given: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end in its own process; `given` is its standard input."""
    raw = given if isinstance(given, bytes) else given.encode()
    return preloaded.run(*words, given=raw, TERM="dumb")


def quire_main(
    *words: str, given: str | bytes = "", folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it in this process, without the second that a process start takes."""
    raw = given if isinstance(given, bytes) else given.encode()
    streams = [TextIOWrapper(BytesIO(part), encoding="utf-8") for part in (raw, b"", b"")]
    stdin, stdout, stderr = streams
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quire", *words])
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        if folder is not None:
            patch.chdir(folder)
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        told = []
        for stream in (stdout, stderr):
            stream.flush()
            told.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    stdin.detach(), stdout.detach(), stderr.detach()
    return subprocess.CompletedProcess(["quire", *words], code, *told)


class Terminal:
    """The command at its own pseudo-terminal, so that Ctrl-C and Ctrl-D reach it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(),
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def press_until(self, key: str, text: str) -> None:
        """Press a key until `text` is shown: readline misses a signal between two keys' reads."""
        end_s = time.monotonic() + LIMIT_S
        while text not in self.shown:
            assert time.monotonic() < end_s, f"{text!r} did not come; shown: {self.shown!r}"
            self.type(key)
            while text not in self.shown and select.select([self._ours], [], [], 1.0)[0]:
                self.shown += self._read()
        self.read_until(text)

    def read_until(self, text: str) -> str:
        """Return what is shown before `text`, and consume both; fail if it does not appear."""
        self._wait(lambda: text in self.shown, f"{text!r} did not come")
        before, _, self.shown = self.shown.partition(text)
        return before

    def read_more(self, num_chars: int) -> None:
        """Wait until so much unconsumed text is shown; fail if it does not appear."""
        self._wait(lambda: len(self.shown) >= num_chars, f"no {num_chars} characters came")

    def _wait(self, is_there: Callable[[], bool], complaint: str) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_there():
            ready, _, _ = select.select([self._ours], [], [], 0.2)
            if ready:
                self.shown += self._read()
            assert time.monotonic() < end_s, f"{complaint}; shown: {self.shown!r}"

    def _read(self) -> str:
        try:
            return os.read(self._ours, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the process ended and closed the terminal
            raise AssertionError(f"it ended; shown: {self.shown!r}") from None

    def end(self) -> int:
        """Wait for the process; return its exit code."""
        return self.process.wait(LIMIT_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
