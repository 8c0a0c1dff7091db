"""Parse tool calls between marks: Hermes and Qwen (<tool_call> JSON </tool_call>), Phi, Granite.

One or more objects, also as a list, stand between two marks; anything else there is dropped. A
block without a call is content, marks included. Text outside of blocks is content.
"""

from __future__ import annotations

from quire.output_parsers.json_call import End, read_call
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore


def read_marked(reader: Reader, sink: Sink, *, opens: tuple[str, ...], closes: str) -> Parse[None]:
    """Parse content and blocks. opens: marks that begin a block. closes: the mark that ends it."""
    openings = Markers(opens)
    opening = yield from reader.until(openings, sink.content, sink.unfinished)
    while opening:
        opening = yield from _block(reader, sink, opening, opens, closes)
        if not opening:
            opening = yield from reader.until(openings, sink.content, sink.unfinished)


def _block(
    reader: Reader, sink: Sink, opening: str, opens: tuple[str, ...], closes: str
) -> Parse[str]:
    """Parse a block. Returns the mark of the next block if the end mark was missing, else ""."""
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
            reader.recorded()  # cannot become content any more
    raw = reader.recorded()
    if sink.num_calls == num_before:
        next_opening = mark if mark in opens else ""
        give_back = sink.content if mark else sink.unfinished
        give_back(opening + raw[: len(raw) - len(next_opening)])
    return mark if mark in opens else ""


def read_listed(reader: Reader, sink: Sink, *, opens: tuple[str, ...]) -> Parse[None]:
    """Parse content, and lists of calls after a mark without an end mark: functools[...]"""
    openings = Markers(opens)
    while opening := (yield from reader.until(openings, sink.content, sink.unfinished)):
        yield from read_list(reader, sink, opening)


def read_list(reader: Reader, sink: Sink, opening: str) -> Parse[None]:
    """Parse a list of calls, or a single one, after a mark; content if there is none."""
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
