"""Install this checkout with pip, and show the progress of the compilation.

    python scripts/install.py [--packages-only] PYTHON [EXTRAS]

Installs the checkout in editable form into the environment of PYTHON, which compiles the native
module anew each time: pip builds in a new temporary environment, which scikit-build-core does not
accept for an earlier build. With --packages-only it installs what the checkout and its extras
depend on. On a terminal one line shows the current phase, the compiled files and the elapsed time;
elsewhere one line is printed at the start. The output of pip is shown only if it fails. Exits with
the code of pip. Needs nothing but the standard library, because it runs before anything is
installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
_STARTED = (
    "[2/3] installing quire-llm{extras} (downloads packages, then compiles the kernels; minutes)"
)
_ADDING = "[2/3] installing the packages of quire-llm{extras}"
_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]")
_MAKE = re.compile(r"^\s*\[\s*(\d+)%\]")
_PHASES = (
    (re.compile(r"^\s*(Installing build dependencies|Collecting|Downloading)\b"), "downloading"),
    (re.compile(r"^\s*\*\*\* Configuring CMake"), "configuring"),
    (re.compile(r"^\s*\*\*\* Building"), "compiling"),
    (re.compile(r"^\s*Installing collected packages"), "installing packages"),
)
_REDRAW_S = 0.5
_NUM_LINES_OF_ERROR = 60


class Progress:
    """The phase of an installation, read from the lines that pip and the build print."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.compiled = ""

    def read(self, line: str) -> None:
        """Update the phase from one line of output; most lines change nothing."""
        if found := _NINJA.match(line):
            self.phase, self.compiled = "compiling", f"{found[1]} of {found[2]} files"
        elif found := _MAKE.match(line):
            self.phase, self.compiled = "compiling", f"{found[1]} %"
        else:
            for pattern, phase in _PHASES:
                if pattern.match(line):
                    self.phase = phase

    def text(self, elapsed_s: float) -> str:
        """Return the progress in one line."""
        compiled = f" {self.compiled}" if self.phase == "compiling" and self.compiled else ""
        return f"[2/3] {self.phase}{compiled}, {elapsed_s:.0f} s"


def requirements(extras: str) -> list[str]:
    """Return what the checkout and the extras, such as "[test,gpu]", depend on.

    Those of the checkout are among them so that pip moves none of them out of its range.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = list(project["dependencies"])
    for extra in filter(None, extras.strip("[]").split(",")):
        needed += project["optional-dependencies"][extra]
    return needed


def install(command: list[str], started_line: str, terminal: TextIO) -> int:
    """Run `command`, show its progress on `terminal`, and return its exit code."""
    progress, started, ended = Progress(), time.monotonic(), threading.Event()
    print(started_line, file=terminal, flush=True)
    drawing = threading.Thread(target=_draw, args=(progress, started, ended, terminal))
    if terminal.isatty():
        drawing.start()
    lines: list[str] = []
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip:
            assert pip.stdout is not None, "created with a pipe"
            for line in pip.stdout:
                lines.append(line)
                progress.read(line)
        code = pip.returncode
    finally:
        ended.set()
        if drawing.is_alive():
            drawing.join()
    if code:
        terminal.writelines(lines[-_NUM_LINES_OF_ERROR:])
    else:
        print(f"[2/3] installed in {time.monotonic() - started:.0f} s", file=terminal, flush=True)
    return code


def _draw(progress: Progress, started: float, ended: threading.Event, terminal: TextIO) -> None:
    """Redraw the line of progress until `ended` is set, then clear it."""
    while not ended.wait(_REDRAW_S):
        terminal.write(f"\r\033[K{progress.text(time.monotonic() - started)}")
        terminal.flush()
    terminal.write("\r\033[K")


def main() -> int:
    arguments = sys.argv[1:]
    packages_only = arguments[0] == "--packages-only"
    python, extras = arguments[packages_only], "".join(arguments[packages_only + 1 :])
    line = (_ADDING if packages_only else _STARTED).format(extras=extras)
    what = requirements(extras) if packages_only else ["--editable", f"{ROOT}{extras}"]
    return install([python, "-m", "pip", "install", "--verbose", *what], line, sys.stdout)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
