"""Items: what the items of an array may be, and whether one is left that was not used.

    items = Items(schema, min_items=0)
    items.is_open(b'"a', used)      # whether an unused item begins with these bytes

An item that must differ from the earlier ones can be a dead end: after "a" and "b", the pattern
^[a-c]$ leaves only "c". `is_open` searches for a way out byte by byte, in a grammar of one item
over a vocabulary of single bytes. Of strings only the beginnings of used ones are searched: every
other beginning has a completion, and no used one. Where strings, integers or numbers are
unrestricted, there is always a way out. Invariants: the answer depends only on schema, beginning
and used items, never on what was asked before; True is certain.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.structured.limits import parser_limits
from quire.structured.matcher import MatcherError
from quire.structured.vocabulary import byte_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# The beginning of a number counts as closed after a search of so many longer ones with so many more
# digits: a number can be written in endless ways (1.0, 1.00).
MAX_SEARCHED = 20_000
MAX_DIGITS = 24
MAX_REMEMBERED = 2_048  # beginnings
_BYTES_AN_ENTRY = 256  # objects of a remembered beginning, besides its bytes
# Distinct items counted for minItems, and lengths up to which they are searched.
# Each finished item keeps a set of those before it for rollback, so memory grows with the square.
MAX_DISTINCT = 1_024  # items of an array with uniqueItems; a full one closes
_LENGTHS = (8, 16, 32, 64, 128, 512)
_NOT_FREE_STRING = frozenset({"maxLength", "pattern", "format", "enum", "const"})
_NOT_FREE_NUMBER = frozenset(
    {
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("enum", "const"),
    }
)
_KNOWN = _NOT_FREE_STRING | _NOT_FREE_NUMBER | {"type", "minLength"}
_QUOTE, _BACKSLASH = 0x22, 0x5C
_NUMBER_STARTS = frozenset(b"-0123456789")
# Popped in reverse: nines first, since each added nine is another value; zeros may add none.
_DIGITS_FIRST = {byte: place for place, byte in enumerate(b"+-eE0.123456789")}
_INTEGER = re.compile(rb"-?(?:[1-9][0-9]*)?")
_ESCAPE = re.compile(
    rb"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\([^u])",
    re.DOTALL,
)
# An escape that has begun, or the first half of a pair.
_PARTIAL = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)\Z"
)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}

# A scalar such that equal ones are equal as JSON: the UTF-8 of a string, a number, or a literal.
Key = bytes | int | float | str
_Point = tuple[bytes, bytes]


def key_of(text: bytes) -> Key:
    """Return the value of a complete scalar."""
    if text[0] == _QUOTE:
        return unescaped(text[1:-1])
    if text[0] not in _NUMBER_STARTS:
        return text.decode()
    if text.lstrip(b"-").isdigit():
        try:
            return int(text)
        except ValueError:  # more digits than int() converts
            return text.decode()
    return float(text)


def unescaped(raw: bytes) -> bytes:
    """Return the UTF-8 of the inside of a JSON string."""
    return _ESCAPE.sub(_character, raw) if b"\\" in raw else raw


def _character(found: re.Match[bytes]) -> bytes:
    high, low, code, letter = found.groups()
    if letter is not None:
        return _LETTERS.get(letter, letter)
    if high is not None:
        pair = bytes.fromhex((high + low).decode())
        return pair.decode("utf-16-be").encode()
    return chr(int(code, 16)).encode("utf-8", "surrogatepass")


def settled(raw: bytes) -> _Point:
    """Return the UTF-8 of the beginning of a string, and the unfinished escape after it."""
    if b"\\" not in raw:
        return raw, b""
    partial = _PARTIAL.search(raw)
    if partial is None:
        return unescaped(raw), b""
    return unescaped(raw[: partial.start(1)]), partial[1]


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """The items an array has so far. strings: those that are strings, sorted."""

    keys: frozenset[Key] = frozenset()
    strings: tuple[bytes, ...] = ()
    known: dict[bytes, bool] = field(default_factory=dict)  # answers of is_open
    # Beginnings of strings without unused completion; more items open none of them.
    closed: set[_Point] = field(default_factory=set)

    def with_item(self, key: Key) -> Used:
        """Return these items and another."""
        strings = self.strings
        if isinstance(key, bytes):
            grown = list(strings)
            insort(grown, key)
            strings = tuple(grown)
        return Used(self.keys | {key}, strings, {}, self.closed.copy())

    def beginning_with(self, start: bytes) -> Iterator[bytes]:
        """Yield the strings that begin so."""
        place = bisect_left(self.strings, start)
        while place < len(self.strings) and self.strings[place].startswith(start):
            yield self.strings[place]
            place += 1

    def has_beginning(self, start: bytes) -> bool:
        """Return whether a string begins so."""
        return next(self.beginning_with(start), None) is not None


class Items:
    """The items of arrays at one place. schema: of scalars, without references."""

    def __init__(self, schema: Mapping[str, Any], *, min_items: int) -> None:
        self.min_items = min_items
        self.is_free_string, self._is_free_number, self._is_free_integer = _free_types(schema)
        self._is_unbounded = any(_free_types(schema))
        self._num_known = _num_known(schema)
        self._grammar = _ItemGrammar(schema)

    @property
    def num_bytes(self) -> int:
        """Return the approximate memory of the beginnings that are remembered."""
        return self._grammar.num_bytes

    def is_open(self, start: bytes, used: Used) -> bool:
        """Return whether an item that is not used begins with `start`, which some item does."""
        if len(used.keys) >= MAX_DISTINCT:
            return False
        if not used.keys or self._is_free(start, used):
            return True
        known = used.known.get(start)
        if known is None:
            known = used.known[start] = self._search(start, used)
        return known

    def is_item(self, text: bytes) -> bool:
        """Return whether a text is an item. Raises MatcherError if the items have no grammar."""
        return self._grammar.after(text)[1]

    def has_more_than(self, num: int) -> bool:
        """Return whether an array may have more items, by the schema's keywords, for certain."""
        return num < MAX_DISTINCT and (self._is_unbounded or self._num_known > num)

    def takes_digits(self, start: bytes) -> bool:
        """Return whether any digits but zeros first, after `start`, begin an unused number."""
        return self._is_free_number or (
            self._is_free_integer and _INTEGER.fullmatch(start) is not None
        )

    def has_enough(self) -> bool:
        """Return whether arrays can have `min_items` distinct items."""
        if self.min_items <= 1 or self.has_more_than(self.min_items):
            return True
        return self.min_items <= MAX_DISTINCT and any(map(self._has_within, _LENGTHS))

    def _has_within(self, length: int) -> bool:
        """Return whether enough items are found among those of a length."""
        found, waiting = set[Key](), [b""]
        for _ in range(MAX_SEARCHED):
            if not waiting:
                return False
            at = waiting.pop()
            following, may_end = self._grammar.after(at)
            if may_end:
                found.add(key_of(at))
                if len(found) >= self.min_items:
                    return True
            if len(at) < length:
                waiting += [at + bytes([byte]) for byte in reversed(following)]
        return False

    def _is_free(self, start: bytes, used: Used) -> bool:
        """Return whether more items than are used begin so, by the schema's keywords."""
        if not start:
            return self.has_more_than(len(used.keys))
        if start[0] == _QUOTE:
            return self.is_free_string
        return start[0] in _NUMBER_STARTS and self.takes_digits(start)

    def _search(self, start: bytes, used: Used) -> bool:
        if not start:
            following, _ = self._grammar.after(start)
            return any(self.is_open(bytes([byte]), used) for byte in following)
        if start[0] == _QUOTE:
            return self._string_search(start, used)
        return self._number_search(start, used)

    def _string_search(self, start: bytes, used: Used) -> bool:
        """Search beginnings of used strings in depth. Those that were searched in vain are closed;
        two ways to write one beginning (an escape or not) are searched once."""
        visited: dict[_Point, None] = {}
        waiting = [start]
        while waiting:
            at = waiting.pop()
            following, may_end = self._grammar.after(at)
            if may_end:
                is_found = key_of(at) not in used.keys
            else:
                point = settled(at[1:])
                if point in visited or point in used.closed:
                    continue
                is_found = not used.has_beginning(point[0])
                if not is_found:
                    visited[point] = None
                    waiting += [at + bytes([byte]) for byte in reversed(following)]
            if is_found:
                found = settled(at[1:-1] if may_end else at[1:])[0]
                used.closed.update(one for one in visited if not found.startswith(one[0]))
                return True
        used.closed.update(visited)
        return False

    def _number_search(self, start: bytes, used: Used) -> bool:
        """Search numbers, and literals, in depth, by added nines first: each is another value."""
        waiting = [start]
        for _ in range(MAX_SEARCHED):
            if not waiting:
                return False
            at = waiting.pop()
            following, may_end = self._grammar.after(at)
            if may_end and key_of(at) not in used.keys:
                return True
            if len(at) - len(start) < MAX_DIGITS:
                order = sorted(following, key=lambda byte: _DIGITS_FIRST.get(byte, -1))
                waiting += [at + bytes([byte]) for byte in order]
        return False


NONE_USED = Used()


def _free_types(schema: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether all strings of a minimum length, all numbers, all integers are items."""
    free = [False, False, False]
    for choice in schema.get("anyOf", [schema]):
        parts = choice["allOf"]
        names = [part["type"] for part in parts if "type" in part]
        types = [{name} if isinstance(name, str) else set(name) for name in names]
        keywords = {name for part in parts for name in part}
        if not types or keywords - _KNOWN:
            continue
        is_free_number = not keywords & _NOT_FREE_NUMBER
        free[0] |= not keywords & _NOT_FREE_STRING and all("string" in some for some in types)
        free[1] |= is_free_number and all("number" in some for some in types)
        free[2] |= is_free_number and all(some & {"integer", "number"} for some in types)
    return free[0], free[1], free[2]


def _num_known(schema: Mapping[str, Any]) -> int:
    """Return a number of distinct items that exist at least: of integers within bounds, and of
    strings of letters and digits with a maximum length."""
    num = 0
    for choice in schema.get("anyOf", [schema]):
        if len(choice["allOf"]) != 1:
            continue
        [part] = choice["allOf"]
        low, high = part.get("minimum"), part.get("maximum")
        if part.keys() == {"type", "maxLength"} and "string" in part["type"]:
            num = max(num, 62 ** min(int(part["maxLength"]), 3))
        if part.keys() == {"type", "minimum", "maximum"} and part["type"] in ("integer", "number"):
            num = max(num, int(high) - int(low) - 1)  # without the bounds, which may be fractions
    return num


class _ItemGrammar:
    """The grammar of one item over single bytes. For any thread."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._lock = threading.Lock()
        self._root: LLMatcher | None = None
        self._cursor: LLMatcher | None = None
        self._at = b""  # what the cursor has taken
        self._known: dict[bytes, tuple[bytes, bool]] = {}
        self.num_bytes = 0  # of _known, approximately

    def after(self, start: bytes) -> tuple[bytes, bool]:
        """Return the bytes that may follow a beginning, and whether it is an item."""
        with self._lock:
            known = self._known.get(start)
            if known is None:
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                    self.num_bytes = 0
                known = self._known[start] = self._computed(start)
                self.num_bytes += len(start) + len(known[0]) + _BYTES_AN_ENTRY
            return known

    def _computed(self, start: bytes) -> tuple[bytes, bool]:
        try:
            return self._asked(start)
        except MatcherError:
            self._root = self._cursor = None  # errors of a lexer are permanent
            return self._asked(start)

    def _asked(self, start: bytes) -> tuple[bytes, bool]:
        same = 0
        while same < min(len(start), len(self._at)) and start[same] == self._at[same]:
            same += 1
        back = len(self._at) - same
        if self._cursor is None or (back and not self._cursor.rollback(back)):
            self._cursor, same = self._fresh(), 0
        self._at = start[:same]
        for byte in start[same:]:
            self._mask()  # renews the lexer's budget
            if not self._cursor.consume_token(byte):
                raise _failed(self._cursor)
            self._at += bytes([byte])
        if self._cursor.is_stopped():
            return b"", True
        mask = np.unpackbits(self._mask().view(np.uint8)[:32], bitorder="little")
        return bytes(mask.nonzero()[0].tolist()), bool(self._cursor.is_accepting())

    def _mask(self) -> Any:
        assert self._cursor is not None, "the caller has a cursor"
        words = np.zeros(byte_vocabulary().mask_words, np.uint32)
        if not self._cursor.is_stopped():
            self._cursor.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._cursor.is_error():
                raise _failed(self._cursor)
        return words

    def _fresh(self) -> LLMatcher:
        from llguidance import LLMatcher

        if self._root is None:
            source = LLMatcher.grammar_from_json_schema(
                dict(self._schema), overrides={"lenient": False, "coerce_one_of": False}
            )
            self._root = LLMatcher(
                byte_vocabulary().tokenizer, source, log_level=0, limits=parser_limits()
            )
            if self._root.is_error():
                raise _failed(self._root)
        return self._root.deep_copy()


def _failed(matcher: LLMatcher) -> MatcherError:
    return MatcherError(f"the items of an array with uniqueItems: {matcher.get_error()[:200]}")
