"""Record the README's terminal session and draw it as an animated SVG.

`python scripts/record_terminal.py docs/terminal.svg` starts a shell in a pseudo-terminal, types the
commands of SESSION, and keeps each character of the output with its time. Nothing is edited: the
commands and the built-in model are real. Pauses are shortened to MAX_PAUSE_S. A renderer without
CSS animations shows the final screen.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import stat
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 92, 32
MAX_PAUSE_S = 0.7
TYPING_S = 0.035
STEP_S = 120.0
# (what to type, the text after which the next line is typed). "\x04" is the end of the input.
SESSION = (
    ("quire chat --seed 7 --max-tokens 90\n", r"> $"),
    ("Hello!\n", r"\n> $"),
    ("What is 3 + 4?\n", r"\n> $"),
    ("Tell me a story about a little dog.\n", r"\n> $"),
    ("\x04", r"\$ $"),
    ("quire serve 2>/dev/null\n", r"ready in .* s\r\n"),
)
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|[\r\n\b\a]|\x1b.")
_COLOURS = {
    31: "#ff7b72",
    32: "#7ee787",
    33: "#e3b341",
    34: "#79c0ff",
    35: "#d2a8ff",
    36: "#76e3ea",
}
_FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14"'
_CELL_WIDTH, _LINE_HEIGHT, _PADDING, _TITLE = 8.43, 19, 14, 30


@dataclass(frozen=True, slots=True)
class Cell:
    """One character, its colour, and when it was written."""

    text: str
    colour: str
    at_s: float


@dataclass(slots=True)
class Screen:
    """The part of a terminal that the session uses: lines, colours, carriage returns, erasing."""

    rows: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    colour: str = ""

    def write(self, text: str, at_s: float) -> None:
        """Write output that came at `at_s`."""
        end = 0
        for match in _CONTROL.finditer(text):
            self._put(text[end : match.start()], at_s)
            self._obey(match)
            end = match.end()
        self._put(text[end:], at_s)

    def _put(self, text: str, at_s: float) -> None:
        for character in text:
            if self.column == COLUMNS:
                self._newline()
            line = self.rows[self.row]
            line.extend(Cell(" ", "", at_s) for _ in range(self.column + 1 - len(line)))
            line[self.column] = Cell(character, self.colour, at_s)
            self.column += 1

    def _newline(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.rows):
            self.rows.append([])

    def _obey(self, match: re.Match[str]) -> None:
        code = match[0]
        if code == "\n":
            column = self.column
            self._newline()
            self.column = column
        elif code == "\r":
            self.column = 0
        elif code == "\b":
            self.column = max(0, self.column - 1)
        elif match[2] == "m":
            numbers = [int(number or 0) for number in match[1].split(";")]
            self.colour = next((_COLOURS[n] for n in numbers if n in _COLOURS), "")
        elif match[2] == "K":
            del self.rows[self.row][self.column :]
        elif match[2] in ("C", "D"):
            step = int(match[1] or 1)
            self.column = max(0, self.column + (step if match[2] == "C" else -step))


def record() -> Screen:
    """Run the session in a pseudo-terminal and return what the screen shows."""
    with tempfile.TemporaryDirectory() as folder:
        command = Path(folder) / "quire"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quire "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "xterm"}
            os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "100", "HISTFILE": "", "ENV": ""}
            os.execlp("sh", "sh", "-i")
        try:
            return _typed(terminal)
        finally:
            os.kill(pid, signal.SIGHUP)
            os.close(terminal)


def _typed(terminal: int) -> Screen:
    screen, clock_s = Screen(), 0.0
    clock_s = _read_until(terminal, screen, r"\$ $", clock_s)
    for keys, end in SESSION:
        for key in keys:
            os.write(terminal, key.encode())
            if key != keys[-1]:
                clock_s = _read_until(terminal, screen, "", clock_s + TYPING_S)
        clock_s = _read_until(terminal, screen, end, clock_s)
    os.write(terminal, b"\x03")
    _read_until(terminal, Screen(), r"\$ $", 0.0)  # the server has stopped
    return screen


def _read_until(terminal: int, screen: Screen, end: str, clock_s: float) -> float:
    """Read output until it matches `end` and return the session's time; one read if `end` is ''."""
    text, last_s = "", time.monotonic()
    deadline_s = last_s + STEP_S
    while not end or not re.search(end, text):
        wait_s = deadline_s - time.monotonic()
        if not select.select([terminal], [], [], max(wait_s, 0))[0]:
            sys.exit(f"the session did not show {end!r}; it showed {text[-200:]!r}")
        new = os.read(terminal, 65536).decode(errors="replace")
        now_s = time.monotonic()
        clock_s += min(now_s - last_s, MAX_PAUSE_S)
        last_s = now_s
        text += new
        screen.write(new, clock_s)
        if not end:
            break
    return clock_s


def svg(screen: Screen) -> str:
    """Return the screen as an SVG in which each piece of text appears at its time."""
    rows = [row for row in screen.rows[:ROWS] if row]
    height = _TITLE + 2 * _PADDING + len(screen.rows[:ROWS]) * _LINE_HEIGHT
    width = 2 * _PADDING + COLUMNS * _CELL_WIDTH
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" '
        'aria-label="Terminal session: quire chat and quire serve">',
        "<style>text{fill:#e6edf3;white-space:pre}tspan{animation:show .01s backwards}"
        "@keyframes show{from{opacity:0}to{opacity:1}}"
        "@media(prefers-reduced-motion:reduce){tspan{animation:none}}</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#0d1117"/>',
        *(
            f'<circle cx="{20 + 18 * place}" cy="18" r="5.5" fill="{colour}"/>'
            for place, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
        ),
    ]
    for number, row in enumerate(screen.rows[:ROWS]):
        if row in rows:
            y = _TITLE + _PADDING + (number + 0.75) * _LINE_HEIGHT
            lines.append(f'<text y="{y:.1f}" {_FONT} xml:space="preserve">{_spans(row)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _spans(row: list[Cell]) -> str:
    """Return the pieces of a row that came together in one colour, each at its own column."""
    pieces, start = [], 0
    for place in range(1, len(row) + 1):
        if place < len(row) and _style(row[place]) == _style(row[start]):
            continue
        text = "".join(cell.text for cell in row[start:place])
        if text.strip():
            at_s, colour = _style(row[start])
            fill = f' fill="{colour}"' if colour else ""
            pieces.append(
                f'<tspan x="{_PADDING + start * _CELL_WIDTH:.1f}"{fill} '
                f'style="animation-delay:{at_s}s">{escape(text)}</tspan>'
            )
        start = place
    return "".join(pieces)


def _style(cell: Cell) -> tuple[float, str]:
    return round(cell.at_s, 2), cell.colour


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the SVG to write")
    parser.parse_args().output.write_text(svg(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
