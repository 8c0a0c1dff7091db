"""Log: one line per event with its fields, whatever the values contain."""

from __future__ import annotations

import io
import re

import pytest

from quire.base.clock import Clock
from quire.base.log import Log


def test_an_event_is_one_line_with_its_fields() -> None:
    stream = io.StringIO()
    Log("engine", stream).event("ready", num_blocks=512, took_ms=3.25, model="box")
    line = stream.getvalue()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info engine: ready "
        r"num_blocks=512 took_ms=3.25 model=box\n",
        line,
    )


def test_values_with_spaces_quotes_and_line_ends_stay_on_the_line() -> None:
    stream = io.StringIO()
    Log("api", stream).error("failed", why='a "b"\nc', empty="")
    assert stream.getvalue().endswith('error api: failed why="a \\"b\\"\\nc" empty=""\n')
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("text", ["a=b", "a b", 'a"', "", "a\x7f", "a\n", "=", "é b"])
def test_ambiguous_values_are_quoted(text: str) -> None:
    stream = io.StringIO()
    Log("api", stream).event("x", value=text)
    quoted = stream.getvalue().partition("value=")[2].removesuffix("\n")
    assert quoted[0] == quoted[-1] == '"'


@pytest.mark.parametrize("text", ["a", "!#<>~", "é", "/v1/x?y", "a'b\\c"])
def test_unambiguous_values_are_not_quoted(text: str) -> None:
    stream = io.StringIO()
    Log("api", stream).event("x", value=text)
    assert stream.getvalue().endswith(f" value={text}\n")


def test_an_event_is_one_line_whatever_its_text() -> None:
    stream = io.StringIO()
    words = "two\nlines\u2028and \x1b[31mred\udc80"
    Log("api", stream).error(words, why=words, where="\x85")
    line = stream.getvalue().encode().decode()
    assert len(line.splitlines()) == 1
    assert line.count("two\\nlines\\u2028and \\x1b[31mred\\udc80") == 1
    assert "\x1b" not in line


def test_a_warning_is_marked() -> None:
    stream = io.StringIO()
    Log("api", stream).warning("slow")
    assert " warning api: slow" in stream.getvalue()


def test_the_clock_does_not_go_back() -> None:
    clock = Clock()
    times = [clock.now_ms() for _ in range(100)]
    assert times == sorted(times)


class _FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_unwritable_line_is_lost_without_other_effects() -> None:
    stream = _FullDisk()
    Log("engine", stream).event("ready")
    Log("engine", stream).error("failed", why="full")
    assert stream.getvalue().count("\n") == 2
