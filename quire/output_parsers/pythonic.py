"""Parse tool calls written as Python (Llama 3.2 and 4), [name(key=value, ...), ...], into JSON.

Calls stand only at the beginning of an answer or after a mark. Nothing is evaluated: quoted text
becomes a JSON string; lists, tuples and dicts become arrays and objects; True, False and None
become their JSON counterparts; a word that is no literal becomes a string. Only the request's
functions are calls.
"""

from __future__ import annotations

import json
import re

from quire.output_parsers.json_call import End
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import SPACE, Markers, Parse, Reader
from quire.output_parsers.tools import Tools
from quire.output_parsers.xml_tags import escaped

_WORD_ENDS = re.compile(r"[,()\[\]{}:= \t\r\n'\"]")
_NAME_ENDS = re.compile(r"[^\w.-]")
_IN_QUOTES = re.compile(r"['\"\\]")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MAX_LEVELS = 64


def read_pythonic(
    reader: Reader, sink: Sink, tools: Tools, *, opens: tuple[str, ...], closes: tuple[str, ...]
) -> Parse[None]:
    """Parse calls, then content. opens: calls may follow these marks. closes: marks to drop."""
    marks = Markers((*opens, *closes))
    mark = ""
    while True:
        yield from _calls(reader, sink, tools, mark)
        mark = yield from reader.until(marks, sink.content, sink.unfinished)
        while mark in closes:
            mark = yield from reader.until(marks, sink.content, sink.unfinished)
        if not mark:
            return


def _calls(reader: Reader, sink: Sink, tools: Tools, opening: str) -> Parse[None]:
    reader.record()
    listed = (yield from reader.space()) == "["
    if listed:
        yield from reader.char()
    while True:
        yield from reader.space()
        name = yield from _word(reader, _NAME_ENDS)
        if not tools.has(name) or (yield from reader.space()) != "(":
            raw = opening + reader.recorded()
            (sink.content if (yield from reader.peek()) else sink.unfinished)(raw)
            return
        reader.recorded()
        opening = ""
        yield from reader.char()
        sink.begin(name)
        end = yield from _arguments(reader, sink, tools.parameters(name))
        sink.broken = end is End.CUT
        reader.record()
        if end is not End.WHOLE or not listed or (yield from reader.space()) != ",":
            break
        yield from reader.char()
    raw = reader.recorded()
    if listed and end is End.WHOLE and (yield from reader.peek()) == "]":
        yield from reader.char()
        return
    sink.content(raw)


def _word(reader: Reader, ends: re.Pattern[str] = _WORD_ENDS) -> Parse[str]:
    """Consume characters up to one that ends a name or a number."""
    word = ""
    while True:
        word += reader.plain(ends)
        character = yield from reader.peek()
        if not character or ends.match(character):
            return word


def _arguments(reader: Reader, sink: Sink, parameters: tuple[str, ...]) -> Parse[End]:
    """Parse the arguments after the opening parenthesis into a JSON object."""
    opening, num_given = "{", 0
    while True:
        character = yield from reader.space()
        if character == "":
            return End.CUT
        if character == ")":
            yield from reader.char()
            sink.arguments("{}" if opening == "{" else "}")
            return End.WHOLE
        if character == ",":
            yield from reader.char()
            continue
        word = yield from _word(reader)
        named = word != "" and (yield from reader.space()) == "="
        if named:
            yield from reader.char()
        at_place = parameters[num_given] if num_given < len(parameters) else f"arg{num_given}"
        key = json.dumps(word if named else at_place, ensure_ascii=False)
        num_given += 1
        if not named and not word and character in ")]}=:":
            return End.JUNK
        sink.arguments(f"{opening}{key}: ")
        opening = ", "
        if word and not named:
            sink.arguments(literal(word))
            continue
        end = yield from _value(reader, sink, _MAX_LEVELS)
        if end is not End.WHOLE:
            return end


def _value(reader: Reader, sink: Sink, levels: int) -> Parse[End]:
    """Parse a value into JSON."""
    character = yield from reader.space()
    if character == "" or levels == 0:
        return End.JUNK if character else End.CUT
    if character in "'\"":
        return (yield from _string(reader, sink))
    if character in "[(":
        return (yield from _elements(reader, sink, levels))
    if character == "{":
        return (yield from _entries(reader, sink, levels))
    word = yield from _word(reader)
    following = yield from reader.peek()
    if word in ("r", "b", "u", "f") and following and following in "'\"":
        return (yield from _string(reader, sink))
    if not word:
        return End.JUNK
    sink.arguments(literal(word))
    return End.WHOLE if following else End.CUT


def _elements(reader: Reader, sink: Sink, levels: int) -> Parse[End]:
    """Parse a list or a tuple."""
    closing = _CLOSING[(yield from reader.char())]
    sink.arguments("[")
    separator = ""
    while True:
        character = yield from reader.space()
        if character == closing:
            yield from reader.char()
            sink.arguments("]")
            return End.WHOLE
        if character == ",":
            yield from reader.char()
            continue
        sink.arguments(separator if character else "")
        separator = ", "
        end = yield from _value(reader, sink, levels - 1)
        if end is not End.WHOLE:
            return end


def _entries(reader: Reader, sink: Sink, levels: int) -> Parse[End]:
    """Parse a dict. Keys that are not strings are converted to strings."""
    yield from reader.char()
    sink.arguments("{")
    separator = ""
    while True:
        character = yield from reader.space()
        if character == "}":
            yield from reader.char()
            sink.arguments("}")
            return End.WHOLE
        if character == ",":
            yield from reader.char()
            continue
        if character == "":
            return End.CUT
        sink.arguments(separator)
        separator = ", "
        if character in "'\"":
            end = yield from _string(reader, sink)
            if end is not End.WHOLE:
                return end
        else:
            word = yield from _word(reader)
            if not word:
                return End.JUNK
            sink.arguments(json.dumps(word, ensure_ascii=False))
        if (yield from reader.space()) != ":":
            return End.JUNK
        yield from reader.char()
        sink.arguments(": ")
        end = yield from _value(reader, sink, levels - 1)
        if end is not End.WHOLE:
            return end


def _string(reader: Reader, sink: Sink) -> Parse[End]:
    """Parse a string in single or triple quotes; adjacent strings are not joined."""
    quote = yield from reader.char()
    sink.arguments('"')
    length = 1
    if (yield from reader.peek()) == quote:
        yield from reader.char()
        if (yield from reader.peek()) != quote:
            sink.arguments('"')
            return End.WHOLE
        yield from reader.char()
        length = 3
    num_quotes = 0
    while True:
        run = reader.plain(_IN_QUOTES)
        if run:
            sink.arguments(escaped(quote * num_quotes + run))
            num_quotes = 0
        character = yield from reader.char()
        if character == quote:
            num_quotes += 1
            if num_quotes == length:
                sink.arguments('"')
                return End.WHOLE
            continue
        sink.arguments(escaped(quote * num_quotes))
        num_quotes = 0
        if character == "":
            return End.CUT
        sink.arguments(escaped((yield from _escape(reader)) if character == "\\" else character))


def _escape(reader: Reader) -> Parse[str]:
    """Return the characters that an escape stands for; "" for an escaped line break."""
    character = yield from reader.char()
    if character == "\n":
        return ""
    if character not in _CODES:
        return _ESCAPES.get(character, character if character in "\\'\"" else f"\\{character}")
    digits = ""
    while len(digits) < _CODES[character]:
        following = yield from reader.peek()
        if not following or following not in "0123456789abcdefABCDEF":
            return f"\\{character}{digits}"
        digits += yield from reader.char()
    code = int(digits, 16)
    return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else "\N{REPLACEMENT CHARACTER}"


def literal(word: str) -> str:
    """Return the JSON of an unquoted word: a constant, a number, or else a string."""
    if word in _WORDS:
        return _WORDS[word]
    number = word.removeprefix("+").replace("_", "")
    return (
        number if _NUMBER.fullmatch(number) else json.dumps(word.strip(SPACE), ensure_ascii=False)
    )
