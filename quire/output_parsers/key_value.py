"""Parse tool calls written as keys and values (GLM 4.5 and later).

    <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>

Line breaks between the parts are optional. Values are unquoted, as in xml_tags.py, and exact: their
white space is part of them. If no valid name follows <tool_call>, all of it is content.
"""

from __future__ import annotations

import json
import re

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore
from quire.output_parsers.tools import Tools
from quire.output_parsers.xml_tags import BLOCK, BLOCK_ENDS, as_json, escaped

KEY, KEY_ENDS = "<arg_key>", "</arg_key>"
VALUE, VALUE_ENDS = "<arg_value>", "</arg_value>"
MARKS = (KEY, KEY_ENDS, VALUE, VALUE_ENDS)
_OUTSIDE = Markers((BLOCK,))
_IN_CALL = Markers((KEY, BLOCK_ENDS, BLOCK))
_KEY_ENDS = Markers((KEY_ENDS,))
_BEFORE_VALUE = Markers((VALUE, KEY, BLOCK_ENDS, BLOCK))
_VALUE_ENDS = Markers((VALUE_ENDS,))
_NAME = re.compile(r"[\w.:/-]+")


def read_keyed(reader: Reader, sink: Sink, tools: Tools) -> Parse[None]:
    """Parse content and calls."""
    mark = ""
    while mark == BLOCK or (yield from reader.until(_OUTSIDE, sink.content, sink.unfinished)):
        parts: list[str] = []
        mark = yield from reader.until(_IN_CALL, parts.append)
        name = "".join(parts).strip()
        if not mark or not _NAME.fullmatch(name):
            give_back = sink.content if mark else sink.unfinished
            give_back("".join((BLOCK, *parts, "" if mark == BLOCK else mark)))
            continue
        sink.begin(name)
        mark = yield from _arguments(reader, sink, tools, name, mark)


def _arguments(reader: Reader, sink: Sink, tools: Tools, name: str, mark: str) -> Parse[str]:
    """Parse all arguments into JSON and return the mark that ended them. mark: consumed last."""
    opening = "{"
    while mark == KEY:
        parts: list[str] = []
        if not (yield from reader.until(_KEY_ENDS, parts.append)):
            sink.broken = True
            return ""
        key = "".join(parts).strip()
        mark = yield from reader.until(_BEFORE_VALUE, ignore)
        if mark != VALUE:
            continue  # a key without a value is dropped
        sink.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        if not (yield from _value(reader, sink, tools.types(name, key))):
            sink.broken = True
            return ""
        mark = yield from reader.until(_IN_CALL, ignore)
    sink.arguments(("{}" if opening == "{" else "}") if mark else "")
    sink.broken = not mark
    return mark


def _value(reader: Reader, sink: Sink, types: frozenset[str]) -> Parse[str]:
    """Parse one value after its mark; return the mark that ended it."""
    if types == {"string"}:
        sink.arguments('"')
        mark = yield from reader.until(_VALUE_ENDS, lambda text: sink.arguments(escaped(text)))
        sink.arguments('"' if mark else "")
        return mark
    parts: list[str] = []
    mark = yield from reader.until(_VALUE_ENDS, parts.append)
    text = "".join(parts)
    sink.arguments(as_json(text, types) if mark else text)
    return mark
