"""Parse tool calls without marks: an answer that is a JSON object (Llama 3) or a list of them.

Calls stand only at the beginning of an answer or after a mark that some models write there
(<|python_tag|>), optionally in a ``` fence, several as a list or one after another. An object is a
call only if it names one of the request's functions. Everything else is content and is passed on as
soon as it cannot be a call any more.
"""

from __future__ import annotations

from quire.output_parsers.json_call import End, read_call
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader
from quire.output_parsers.tools import Tools

_BETWEEN = (",", ";")


def read_bare(reader: Reader, sink: Sink, tools: Tools, *, marks: tuple[str, ...]) -> Parse[None]:
    """Parse calls, then content. marks: calls may also follow one of these."""
    openings = Markers(marks)
    opening = ""
    while True:
        yield from _calls(reader, sink, tools, opening)
        opening = yield from reader.until(openings, sink.content, sink.unfinished)
        if not opening:
            return


def _calls(reader: Reader, sink: Sink, tools: Tools, opening: str) -> Parse[None]:
    """Parse consecutive calls; text that turns out not to be a call becomes content."""
    num_before = sink.num_calls
    reader.record()
    fenced = yield from _fence(reader)
    listed, is_cut = False, False
    while True:
        character = yield from reader.space()
        if character == "{":
            yield from reader.char()
            begun, end = yield from read_call(reader, sink, accepts=tools.has, strict=True)
            if not begun:
                is_cut = end is End.CUT
                break
            reader.record()
        elif character == "[" and sink.num_calls == num_before and not listed:
            yield from reader.char()
            listed = True
        elif character and character in _BETWEEN and sink.num_calls > num_before:
            yield from reader.char()
        elif character == "]" and listed:
            yield from reader.char()
            listed = False
        elif character == "`" and fenced and sink.num_calls > num_before:
            yield from reader.char()
        else:
            break
    raw = reader.recorded()
    if is_cut:
        sink.unfinished(opening * (sink.num_calls == num_before) + raw)
    elif sink.num_calls == num_before:
        sink.content(opening + raw)
    elif raw.strip(" \t\r\n,;]`"):
        sink.content(raw)
    else:
        sink.content(raw[len(raw.rstrip()) :])  # white space, if content follows


def _fence(reader: Reader) -> Parse[bool]:
    """Consume an opening ``` and the language name after it, and return whether it was there."""
    if (yield from reader.space()) != "`":
        return False
    for _ in range(3):
        if (yield from reader.peek()) != "`":
            return False
        yield from reader.char()
    while (character := (yield from reader.peek())).isalpha() or character == "_":
        yield from reader.char()
    return True
