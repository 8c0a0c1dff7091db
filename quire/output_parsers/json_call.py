"""Parse tool calls written as JSON objects, {"name": ..., "arguments": {...}}, incrementally.

Arguments are passed on character by character as the model wrote them; arguments given as JSON text
within a string are unescaped. Keys may come in any order, and may be nested in an object under
"function". Malformed JSON is not rejected: an object with a name is a call, and whatever stands in
place of its arguments is passed on. Knows no model's marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader, ignore

NAMES = frozenset({"name", "function", "tool_name"})
ARGUMENTS = frozenset({"arguments", "parameters"})
# Keys that may precede the name in strict mode.
_BEFORE_NAME = NAMES | ARGUMENTS | {"type", "id"}
NO_MARKERS = Markers(())
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_IN_SCALAR = re.compile(r'["{}\[\]<, \t\r\n]')
_SIMPLE_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class End(Enum):
    """Say how the parsing of an element ended."""

    WHOLE = 1  # at its own last character
    MARKER = 2  # at an end marker, which was consumed
    CUT = 3  # at the end of the text
    JUNK = 4  # at an invalid character, which was not consumed
    REFUSED = 5  # not the expected element


class _Open:
    """Hold a call while it is parsed; arguments are buffered until its name is known."""

    def __init__(self, sink: Sink, accepts: Callable[[str], bool], *, strict: bool) -> None:
        self.begun = False
        self.has_arguments = False  # the key has occurred
        self.is_empty = True
        self.strict = strict
        self._sink = sink
        self._accepts = accepts
        self._waiting: list[str] = []

    def named(self, name: str) -> bool:
        """Begin the call under this name and return whether the name is accepted."""
        if not name or not self._accepts(name):
            return False
        self._sink.begin(name)
        self.begun = True
        for text in self._waiting:
            self._sink.arguments(text)
        self._waiting = []
        return True

    def argue(self, text: str) -> None:
        self.is_empty = self.is_empty and not text
        if self.begun:
            self._sink.arguments(text)
        else:
            self._waiting.append(text)


def any_name(name: str) -> bool:
    """Accept any name."""
    return True


def read_call(
    reader: Reader,
    sink: Sink,
    *,
    accepts: Callable[[str], bool] = any_name,
    ends: Markers = NO_MARKERS,
    strict: bool = False,
) -> Parse[tuple[bool, End]]:
    """Parse an object after its "{"; return whether a call began and how the object ended.

    ends: marks, beginning with "<", that end the object anywhere outside of strings. strict: a key
    that calls do not have, before the name, shows that the object is not a call (End.REFUSED).
    """
    call = _Open(sink, accepts, strict=strict)
    end = yield from _members(reader, call, ends, may_nest=True)
    if not call.begun:
        return False, end
    if call.is_empty and end is not End.CUT:
        sink.arguments("{}")
    sink.broken = end is End.CUT
    return True, end


def _members(reader: Reader, call: _Open, ends: Markers, *, may_nest: bool) -> Parse[End]:
    while True:
        character = yield from reader.space()
        if character == "":
            return End.CUT
        if character == "}":
            yield from reader.char()
            return End.WHOLE
        if character == ",":
            yield from reader.char()
        elif character == '"':
            end = yield from _member(reader, call, ends, may_nest=may_nest)
            if end is not End.WHOLE:
                return end
        elif character == "<":
            return (yield from _mark(reader, ends, ignore)) or End.JUNK
        else:
            return End.JUNK


def _member(reader: Reader, call: _Open, ends: Markers, *, may_nest: bool) -> Parse[End]:
    key = yield from _text(reader)
    if key is None:
        return End.CUT
    if call.strict and not call.begun and key not in _BEFORE_NAME:
        return End.REFUSED
    if (yield from reader.space()) != ":":
        return End.WHOLE  # a string without a value; parse what follows as the next key
    yield from reader.char()
    first = yield from reader.space()
    if key in NAMES and first == '"' and not call.begun:
        name = yield from _text(reader)
        if name is None:
            return End.CUT
        return End.WHOLE if call.named(name) else End.REFUSED
    if key == "function" and first == "{" and may_nest and not call.begun:
        yield from reader.char()
        return (yield from _members(reader, call, ends, may_nest=False))
    if key in ARGUMENTS and not call.has_arguments:
        call.has_arguments = True
        return (yield from read_value(reader, call.argue, ends))
    return (yield from read_value(reader, ignore, ends))


def _text(reader: Reader) -> Parse[str | None]:
    """Parse a string and decode it; None if the text ends within it."""
    parts: list[str] = []
    end = yield from read_string(reader, parts.append)
    return "".join(parts) if end is End.WHOLE else None


def read_value(
    reader: Reader, out: Callable[[str], None], ends: Markers = NO_MARKERS, *, depth: int = 0
) -> Parse[End]:
    """Pass on a JSON value as written (a string is decoded), up to a following "," or "}".

    depth: number of the value's brackets that have been consumed already.
    """
    if depth == 0 and (yield from reader.space()) == '"':
        return (yield from read_string(reader, out))
    while True:
        stops = _IN_VALUE if depth else _IN_SCALAR
        run = reader.plain(stops)
        if run:
            out(run)
        character = yield from reader.peek()
        if character == "":
            return End.CUT
        if not stops.match(character):
            continue  # a new chunk that begins with plain characters
        if character == '"':
            end = yield from _raw_string(reader, out)
            if end is not End.WHOLE:
                return end
        elif character == "<":
            end_or_none = yield from _mark(reader, ends, out)
            if end_or_none is not None:
                return end_or_none
        elif depth == 0 and character not in "{[":
            return End.WHOLE
        else:
            yield from reader.char()
            out(character)
            depth += 1 if character in "{[" else -1 if character in "}]" else 0
            if depth == 0 and character in "}]":
                return End.WHOLE


def _mark(reader: Reader, ends: Markers, out: Callable[[str], None]) -> Parse[End | None]:
    """Consume one of the end marks, or pass on what begins with "<" as ordinary text."""
    held = ""
    while True:
        character = yield from reader.peek()
        if character and held + character in ends.openings:
            held += yield from reader.char()
            if held in ends.texts:
                return End.MARKER
            continue
        if not held:
            held = yield from reader.char()
        out(held)
        return None if character else End.CUT


def _raw_string(reader: Reader, out: Callable[[str], None]) -> Parse[End]:
    """Pass on a string as written, with quotes and escapes."""
    out((yield from reader.char()))
    while True:
        character = yield from _after_plain(reader, out)
        if character == "":
            return End.CUT
        out(character)
        if character == '"':
            return End.WHOLE
        if character == "\\":
            out((yield from reader.char()))


def read_string(reader: Reader, out: Callable[[str], None]) -> Parse[End]:
    """Decode a string; an invalid escape stands for the escaped character."""
    yield from reader.char()
    while True:
        character = yield from _after_plain(reader, out)
        if character == "":
            return End.CUT
        if character == '"':
            return End.WHOLE
        if character == "\\":
            yield from _escape(reader, out)
        else:
            out(character)


def _after_plain(reader: Reader, out: Callable[[str], None]) -> Parse[str]:
    """Pass on a string's plain characters and return the next one; "" at the end of the text."""
    run = reader.plain(_IN_STRING)
    if run:
        out(run)
    return (yield from reader.char())


def _escape(reader: Reader, out: Callable[[str], None]) -> Parse[None]:
    """Decode what follows a backslash; surrogate pairs are joined, lone ones become U+FFFD."""
    character = yield from reader.char()
    if character != "u":
        out(_SIMPLE_ESCAPES.get(character, character))
        return
    code = yield from _code(reader)
    while 0xD800 <= code < 0xDC00:
        if (yield from reader.peek()) != "\\":
            break
        yield from reader.char()
        if (yield from reader.peek()) != "u":
            out(_REPLACEMENT)
            yield from _escape(reader, out)
            return
        yield from reader.char()
        low = yield from _code(reader)
        if 0xDC00 <= low < 0xE000:
            out(chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)))
            return
        out(_REPLACEMENT)
        code = low
    out(_REPLACEMENT if code < 0 or 0xD800 <= code < 0xE000 else chr(code))


def _code(reader: Reader) -> Parse[int]:
    """Parse four hexadecimal digits; return -1, without consuming the rest, if there are fewer."""
    digits = ""
    while len(digits) < 4:
        character = yield from reader.peek()
        if not character or character not in "0123456789abcdefABCDEF":
            return -1
        digits += yield from reader.char()
    return int(digits, 16)
