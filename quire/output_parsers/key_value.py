"""Tool calls as keys and values (GLM 4.5 and later): <tool_call>NAME <arg_key>KEY</arg_key>

<arg_value>VALUE</arg_value> ... </tool_call>, with line breaks between the parts or without. Values
stand there without quotes, as in tags.py, and exactly: white space in them is theirs. What stands
behind <tool_call> and is no name makes all of it content.
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
    """Content and calls."""
    mark = ""
    while mark == BLOCK or (yield from reader.until(_OUTSIDE, sink.content, sink.unfinished)):
        heard: list[str] = []
        mark = yield from reader.until(_IN_CALL, heard.append)
        name = "".join(heard).strip()
        if not mark or not _NAME.fullmatch(name):
            give_back = sink.content if mark else sink.unfinished
            give_back("".join((BLOCK, *heard, "" if mark == BLOCK else mark)))
            continue
        sink.begin(name)
        mark = yield from _arguments(reader, sink, tools, name, mark)


def _arguments(reader: Reader, sink: Sink, tools: Tools, name: str, mark: str) -> Parse[str]:
    """All of them, as JSON. mark: the one that was taken last. Returns the one that ended them."""
    opening = "{"
    while mark == KEY:
        heard: list[str] = []
        if not (yield from reader.until(_KEY_ENDS, heard.append)):
            sink.broken = True
            return ""
        key = "".join(heard).strip()
        mark = yield from reader.until(_BEFORE_VALUE, ignore)
        if mark != VALUE:
            continue  # a key without a value says nothing
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
    """One value, its mark taken. Returns the mark that ended it."""
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
