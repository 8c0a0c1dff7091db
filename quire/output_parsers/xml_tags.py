"""Parse tool calls written as tags (Qwen3-Coder).

    <tool_call> <function=NAME> <parameter=KEY> value </parameter> </function> </tool_call>

<tool_call> is optional. Values are unquoted: a value that is a string by the function's schema
becomes a JSON string incrementally; any other value is read whole and becomes JSON if it is valid
JSON of an allowed type, else a string. A value ends only at </parameter>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore
from quire.output_parsers.tools import Tools

BLOCK, BLOCK_ENDS = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_ENDS = "<function=", "</function>"
PARAMETER, PARAMETER_ENDS = "<parameter=", "</parameter>"
_OUTSIDE = Markers((BLOCK, FUNCTION))
_BEHIND = Markers((BLOCK, FUNCTION, BLOCK_ENDS))
_IN_BLOCK = Markers((FUNCTION, BLOCK_ENDS))
_IN_FUNCTION = Markers((PARAMETER, FUNCTION_ENDS, BLOCK_ENDS))
_TAG_ENDS = Markers((">",))
_VALUE_ENDS = Markers((PARAMETER_ENDS,))
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def read_tags(reader: Reader, sink: Sink, tools: Tools) -> Parse[None]:
    """Parse content and calls."""
    outside, mark = _OUTSIDE, ""
    while True:
        mark = yield from reader.until(outside, sink.content, sink.unfinished)
        if not mark:
            return
        opening = mark
        reader.record()
        if mark == BLOCK:
            mark = yield from reader.until(_IN_BLOCK, ignore)
        num_before = sink.num_calls
        while mark == FUNCTION:
            mark = yield from _function(reader, sink, tools)
            if opening == BLOCK and mark == FUNCTION_ENDS:
                mark = yield from reader.until(_IN_BLOCK, ignore)
        outside = _BEHIND if opening == FUNCTION and mark == FUNCTION_ENDS else _OUTSIDE
        raw = reader.recorded()
        if sink.num_calls == num_before and opening != BLOCK_ENDS:
            is_cut = not mark and not (yield from reader.peek())
            (sink.unfinished if is_cut else sink.content)(opening + raw)


def _function(reader: Reader, sink: Sink, tools: Tools) -> Parse[str]:
    """Parse one call after its mark; return the mark that ended it."""
    parts: list[str] = []
    if not (yield from reader.until(_TAG_ENDS, parts.append)):
        return ""
    name = "".join(parts).strip().strip("\"'")
    if not name or "<" in name:
        return ""
    reader.recorded()
    sink.begin(name)
    opening = "{"
    while True:
        mark = yield from reader.until(_IN_FUNCTION, ignore)
        if mark != PARAMETER:
            sink.arguments(("{}" if opening == "{" else "}") if mark else "")
            sink.broken = not mark
            return mark
        key: list[str] = []
        if not (yield from reader.until(_TAG_ENDS, key.append)):
            sink.broken = True
            return ""
        said = "".join(key).strip().strip("\"'")
        sink.arguments(f"{opening}{json.dumps(said, ensure_ascii=False)}: ")
        opening = ", "
        if not (yield from read_raw_value(reader, sink, tools.types(name, said), _VALUE_ENDS)):
            sink.broken = True
            return ""


def read_raw_value(reader: Reader, sink: Sink, types: frozenset[str], ends: Markers) -> Parse[str]:
    """Parse an unquoted value into JSON. One line break at each end belongs to the format."""
    if types == {"string"}:
        sink.arguments('"')
        mark = yield from _lines(reader, lambda text: sink.arguments(escaped(text)), ends)
        sink.arguments('"' if mark else "")
        return mark
    parts: list[str] = []
    mark = yield from _lines(reader, parts.append, ends)
    text = "".join(parts)
    sink.arguments(as_json(text, types) if mark else text)
    return mark


def _lines(reader: Reader, out: Callable[[str], None], ends: Markers) -> Parse[str]:
    """Pass on text up to a mark, without the line breaks around it."""
    held = ""

    def pass_on(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        out(text[: len(text) - len(held)])

    if (yield from reader.peek()) == "\n":
        yield from reader.char()
    return (yield from reader.until(ends, pass_on))


def escaped(text: str) -> str:
    """Escape text for use inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert an unquoted value to JSON according to its allowed types."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if types & {"number", "integer"} and _NUMBER.fullmatch(bare):
        return bare
    if types & {"object", "array"} and _is_json(bare, types):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str, types: frozenset[str]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return (isinstance(value, dict) and "object" in types) or (
        isinstance(value, list) and "array" in types
    )
