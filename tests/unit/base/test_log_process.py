"""Standard error of a process: one writer, one format, never blocking."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from quire.base.log_sink import MAX_QUEUED_LINES, LineWriter

ROOT = Path(__file__).parents[3]
GIVE_UP_S = 60.0
START = """
import gc, logging, sys, threading, warnings
from quire.base.log import Log
from quire.base.log_process import LogSettings, start_logging
start_logging("test", LogSettings(form="json", level="warning"))
"""


def logged(program: str) -> list[dict[str, str]]:
    """Return the lines that a process logs, parsed as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        cwd=ROOT,
        check=False,
    )
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_an_uncaught_exception_is_one_line_with_its_traceback() -> None:
    (line,) = logged("1 / 0")
    assert (line["level"], line["event"]) == ("error", "uncaught exception")
    assert line["traceback"].endswith("ZeroDivisionError: division by zero\n")


def test_thread_and_unraisable_exceptions_are_lines() -> None:
    lines = logged(
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "class Bad:\n    def __del__(self): raise KeyError('gone')\n"
        "Bad(); gc.collect()"
    )
    assert [line["event"] for line in lines] == ["uncaught exception"] * 2
    assert "ZeroDivisionError" in lines[0]["traceback"]
    assert "KeyError" in lines[1]["traceback"]


def test_libraries_warnings_and_prints_are_lines_too() -> None:
    lines = logged(
        "logging.getLogger('some.library').error('it %s', 'failed')\n"
        "logging.getLogger('some.library').error('wrong %d', 'format')\n"
        "warnings.warn('old', DeprecationWarning)\n"
        "warnings.warn('odd')\n"
        "print('two\\nlines', file=sys.stderr)\n"
        "Log('own').event('left out'); Log('own').warning('kept', count=2)"
    )
    assert [(line["component"], line["level"]) for line in lines] == [
        ("some.library", "error"),
        ("some.library", "error"),
        ("py.warnings", "warning"),
        ("py.warnings", "warning"),
        ("test", "error"),
        ("test", "error"),
        ("own", "warning"),
    ]
    assert lines[0]["event"] == "it failed"
    assert lines[3]["event"].endswith("UserWarning: odd")
    assert [line["event"] for line in lines[4:6]] == ["two", "lines"]
    assert lines[6]["count"] == 2


def test_a_writer_to_a_full_pipe_drops_counts_and_reports() -> None:
    read, write = os.pipe()
    writer = LineWriter(write, lambda count: f"dropped {count}")
    num_lines = 4 * MAX_QUEUED_LINES
    for number in range(num_lines):
        writer.write(f"{number} " + "x" * 100)
    assert writer.num_dropped > 0
    pieces, numbers, ends = b"", list[int](), False
    while not pieces.endswith(b"end\n"):
        pieces += os.read(read, 65536)
        numbers = [int(one) for one in re.findall(rb"^(\d+) x+\n", pieces, re.M)]
        if len(numbers) + writer.num_dropped == num_lines and not ends:
            ends = True  # nothing is queued now: this line is not dropped
            writer.write("end")
    # Lines may be dropped, and reported, more than once: as the writer's thread gets on.
    reported = map(int, re.findall(rb"^dropped (\d+)\n", pieces, re.M))
    assert sum(reported) == writer.num_dropped
    assert numbers == sorted(numbers)
    writer.close(GIVE_UP_S)
    os.close(read)
    os.close(write)


def test_native_code_that_writes_to_a_full_pipe_holds_up_nothing() -> None:
    """It holds the interpreter lock, so no other thread could read what the pipe has."""
    program = START + (
        "import ctypes, os\n"
        "libc = ctypes.PyDLL(None)\n"
        "raw = bytes(65536)\n"
        "written = [libc.write(2, raw, len(raw)) > 0 for _ in range(40)]\n"
        "print(written.count(False) >= 20, flush=True)\n"
        "os._exit(0)\n"
    )
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=write,
            cwd=ROOT,
            timeout=GIVE_UP_S,
            check=True,
            text=True,
        )
        assert done.stdout == "True\n"
        assert os.get_blocking(write)  # of this process, which has the same pipe
    finally:
        os.close(read)
        os.close(write)


def test_a_file_has_each_line_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        writer = LineWriter(file.fileno(), str)
        writer.write("one")
        writer.write("lone \udc80 surrogate")
        assert (tmp_path / "log").read_bytes() == b"one\nlone \\udc80 surrogate\n"
    assert writer.num_dropped == 0
