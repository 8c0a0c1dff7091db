"""Tool calls between marks: Hermes and Qwen (<tool_call> JSON </tool_call>), Phi and Granite.

Between two marks stand one or more objects, also as a list; whatever else stands there is left
out. A block in which no call can be found is content, marks and all. Text outside is content.
"""

from __future__ import annotations

from quire.output_parsers.json_call import End, read_call
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore


def read_marked(reader: Reader, sink: Sink, *, opens: tuple[str, ...], closes: str) -> Parse[None]:
    """Content and blocks. opens: marks that begin a block. closes: the mark that ends it."""
    openings = Markers(opens)
    opening = yield from reader.until(openings, sink.content, sink.unfinished)
    while opening:
        opening = yield from _block(reader, sink, opening, opens, closes)
        if not opening:
            opening = yield from reader.until(openings, sink.content, sink.unfinished)


def _block(
    reader: Reader, sink: Sink, opening: str, opens: tuple[str, ...], closes: str
) -> Parse[str]:
    """One block. Returns the mark that begins the next where the end mark was left out, or ""."""
    inside = Markers(("{", closes, *opens))
    num_before = sink.num_calls
    reader.record()
    while True:
        mark = yield from reader.until(inside, ignore)
        if mark != "{":
            break
        _, end = yield from read_call(reader, sink, ends=Markers((closes,)))
        if end is End.MARKER:
            mark = closes
            break
        if sink.num_calls > num_before:
            reader.recorded()  # it will not be content any more
    raw = reader.recorded()
    if sink.num_calls == num_before:
        next_opening = mark if mark in opens else ""
        give_back = sink.content if mark else sink.unfinished
        give_back(opening + raw[: len(raw) - len(next_opening)])
    return mark if mark in opens else ""


def read_listed(reader: Reader, sink: Sink, *, opens: tuple[str, ...]) -> Parse[None]:
    """Content, and lists of calls behind a mark, without a mark at their end: functools[...]"""
    openings = Markers(opens)
    while opening := (yield from reader.until(openings, sink.content, sink.unfinished)):
        yield from read_list(reader, sink, opening)


def read_list(reader: Reader, sink: Sink, opening: str) -> Parse[None]:
    """A list of calls, or one alone, behind a mark; content where none is found."""
    num_before = sink.num_calls
    reader.record()
    is_list = False
    while True:
        character = yield from reader.space()
        if character == "{":
            yield from reader.char()
            yield from read_call(reader, sink)
            if sink.num_calls > num_before:
                reader.recorded()
            if not is_list:
                break
        elif character == "[" and not is_list:
            yield from reader.char()
            is_list = True
        elif character in (",", "]") and is_list:
            yield from reader.char()
            if character == "]":
                break
        else:
            break
    raw = reader.recorded()
    if sink.num_calls == num_before:
        (sink.content if character else sink.unfinished)(opening + raw)
