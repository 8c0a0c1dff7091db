"""Parse Mistral's tool calls: [TOOL_CALLS] and a list of objects, or a name and its arguments.

Tokenizers up to version 7 write a list; later ones write [TOOL_CALLS]name[ARGS]{...} for each call,
some with [CALL_ID] and an id in between, which is dropped.
"""

from __future__ import annotations

from quire.output_parsers.json_call import End, read_value
from quire.output_parsers.marked_json import read_list
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore

CALLS, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_OPENINGS = Markers((CALLS,))
_AFTER_NAME = Markers((ARGUMENTS, ID, CALLS, "{"))
_AFTER_ID = Markers((ARGUMENTS, CALLS, "{"))


def read_mistral(reader: Reader, sink: Sink) -> Parse[None]:
    """Parse content and calls."""
    opening = yield from reader.until(_OPENINGS, sink.content, sink.unfinished)
    while opening:
        reader.record()
        character = yield from reader.space()
        reader.unread(reader.recorded())
        opening = ""
        if character and character in "[{":
            yield from read_list(reader, sink, CALLS)
        else:
            opening = yield from _named(reader, sink)
        if not opening:
            opening = yield from reader.until(_OPENINGS, sink.content, sink.unfinished)


def _named(reader: Reader, sink: Sink) -> Parse[str]:
    """Parse one call by name. Returns the next call's mark if it interrupted this one, else ""."""
    name: list[str] = []
    reader.record()
    mark = yield from reader.until(_AFTER_NAME, name.append)
    if mark == ID:
        mark = yield from reader.until(_AFTER_ID, ignore)
    raw = reader.recorded()
    called = "".join(name).strip()
    if mark not in (ARGUMENTS, "{") or not called:
        give_back = sink.content if mark else sink.unfinished
        give_back(CALLS + raw[: len(raw) - len(mark)])
        if mark in (ARGUMENTS, "{"):
            reader.unread(mark)
            return ""
        return mark
    sink.begin(called)
    if mark == "{":
        sink.arguments("{")
    end = yield from read_value(reader, sink.arguments, depth=int(mark == "{"))
    sink.broken = end is End.CUT
    return ""
