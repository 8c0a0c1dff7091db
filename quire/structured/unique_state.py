"""Position: where an answer stands in a JSON document, and the items of its unique arrays.

    position = beginning(places)
    position = position.after(b'{"tags": ["a", ')      # None: an item is repeated, or none is left

A reader of JSON bytes that remembers only what uniqueItems needs: nesting, the names of properties
above such an array, and its items. The text is valid JSON, which llguidance ensures. Knows no
tokens. Invariant: positions are immutable, so that rolling back and copying cost nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from quire.structured.item_values import NONE_USED, Items, Used, key_of

_STRING_STOP = re.compile(rb'["\\]')
_SCALAR_STOP = re.compile(rb"[ \t\r\n,\]}]")
_SPACE = frozenset(b" \t\r\n")
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE, _BEGIN, _END = b'",:[]{}'


class Mode(Enum):
    """What the next byte belongs to."""

    VALUE = auto()  # a value begins, or an empty array ends
    STRING = auto()
    SCALAR = auto()  # a number or a literal
    AFTER = auto()  # a comma or the end of an array or object, or of the document
    KEY = auto()  # a property's name begins, or an empty object ends
    NAME = auto()  # within a property's name
    COLON = auto()


@dataclass(slots=True, eq=False)
class Place:
    """A position of a schema. items: of its arrays' items that must be distinct; entries, named,
    others: the places of items and properties, None where nothing is tracked."""

    items: Items | None = None
    entries: Place | None = None
    named: dict[str, Place | None] = field(default_factory=dict)
    others: Place | None = None


def places_of(plan: Mapping[str, Any]) -> tuple[Place, list[Items]]:
    """Return the first place of a plan (unique_plan.py), and all items it tracks."""
    items = [Items(entry["schema"], min_items=entry["min_items"]) for entry in plan["items"]]
    places = [Place() for _ in plan["places"]]

    def at(index: int | None) -> Place | None:
        return None if index is None else places[index]

    for place, entry in zip(places, plan["places"], strict=True):
        place.items = None if entry["unique"] is None else items[entry["unique"]]
        place.entries, place.others = at(entry["items"]), at(entry["others"])
        place.named = {name: at(index) for name, index in entry["named"].items()}
    return places[0], items


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """An open array or object. used: the items so far of an array with distinct items."""

    above: _Level | None
    is_array: bool
    place: Place | None
    used: Used | None


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """level: the innermost open array or object. place: of the next value. text: the begun scalar
    or name as far as it is needed. is_escaped: the byte before is a backslash that escapes."""

    mode: Mode
    level: _Level | None
    place: Place | None
    text: bytes = b""
    is_escaped: bool = False

    @property
    def items(self) -> Items | None:
        """The items of the innermost array, if they must be distinct."""
        level = self.level
        return level.place.items if level and level.is_array and level.place else None

    @property
    def used(self) -> Used:
        """The items that array has so far."""
        return (self.level and self.level.used) or NONE_USED

    @property
    def is_open(self) -> bool:
        """Return whether the item that has begun can still differ from the earlier ones."""
        items = self.items
        return items is None or not self.text or items.is_open(self.text, self.used)

    def after(self, raw: bytes) -> Position | None:
        """Return the position after more bytes; None if an item is repeated, or a comma demands
        another item where all are used."""
        reader = _Reader(self)
        return reader.position() if reader.read(raw) else None


def beginning(place: Place) -> Position:
    """Return the position before a document."""
    return Position(Mode.VALUE, None, place)


class _Reader:
    """Reads bytes from a position on."""

    __slots__ = ("is_escaped", "level", "mode", "place", "text")

    def __init__(self, start: Position) -> None:
        self.mode, self.level, self.place = start.mode, start.level, start.place
        self.text, self.is_escaped = start.text, start.is_escaped

    def position(self) -> Position:
        return Position(self.mode, self.level, self.place, self.text, self.is_escaped)

    def read(self, raw: bytes) -> bool:
        """Return whether the items of all arrays are distinct, and can stay so."""
        at = 0
        while at < len(raw):
            if self.mode is Mode.STRING or self.mode is Mode.NAME:
                at, is_distinct = self._string(raw, at)
            elif self.mode is Mode.SCALAR:
                at, is_distinct = self._scalar(raw, at)
            else:
                is_distinct = raw[at] in _SPACE or self._mark(raw[at])
                at += 1
            if not is_distinct:
                return False
        return True

    def _string(self, raw: bytes, at: int) -> tuple[int, bool]:
        """Read a string or a name up to its end."""
        begin = at
        if self.is_escaped:
            self.is_escaped, at = False, at + 1
        while (stop := _STRING_STOP.search(raw, at)) is not None:
            at = stop.end()
            if raw[at - 1] == _QUOTE:
                self._keep(raw[begin:at])
                return at, self._end_name() if self.mode is Mode.NAME else self._end_item()
            if at == len(raw):
                self.is_escaped = True
            at += 1
        self._keep(raw[begin:])
        return len(raw), True

    def _scalar(self, raw: bytes, at: int) -> tuple[int, bool]:
        stop = _SCALAR_STOP.search(raw, at)
        end = len(raw) if stop is None else stop.start()
        self._keep(raw[at:end])
        return end, stop is None or self._end_item()

    def _keep(self, text: bytes) -> None:
        if self.text:  # begun where it is needed
            self.text += text

    def _mark(self, byte: int) -> bool:
        """Read a byte outside of strings and scalars."""
        if byte == _COMMA:
            return self._comma()
        if byte == _COLON:
            self.mode = Mode.VALUE
        elif byte in (_OPEN, _BEGIN):
            self._open(is_array=byte == _OPEN)
        elif byte in (_CLOSE, _END):
            assert self.level is not None, "valid JSON closes what is open"
            self.mode, self.level = Mode.AFTER, self.level.above
        elif self.mode is Mode.KEY:
            self.mode = Mode.NAME
            self.text = b'"' if self.level is not None and self.level.place is not None else b""
        else:
            self.mode = Mode.STRING if byte == _QUOTE else Mode.SCALAR
            is_item = self.level is not None and self.level.used is not None
            self.text = bytes([byte]) if is_item else b""
        return True

    def _comma(self) -> bool:
        level = self.level
        assert level is not None, "valid JSON has commas in arrays and objects only"
        if not level.is_array:
            self.mode = Mode.KEY
            return True
        self.mode = Mode.VALUE
        self.place = None if level.place is None else level.place.entries
        if level.used is None or level.place is None or level.place.items is None:
            return True
        return level.place.items.is_open(b"", level.used)

    def _open(self, *, is_array: bool) -> None:
        place = self.place
        is_unique = is_array and place is not None and place.items is not None
        self.level = _Level(self.level, is_array, place, NONE_USED if is_unique else None)
        self.mode = Mode.VALUE if is_array else Mode.KEY
        self.place = None if place is None else place.entries

    def _end_name(self) -> bool:
        level = self.level
        self.place = None
        if self.text and level is not None and level.place is not None:
            self.place = level.place.named.get(json.loads(self.text), level.place.others)
        self.mode, self.text = Mode.COLON, b""
        return True

    def _end_item(self) -> bool:
        """End a string or scalar; return False if it repeats an item."""
        text, level = self.text, self.level
        self.mode, self.text = Mode.AFTER, b""
        if not text or level is None or level.used is None:
            return True
        key = key_of(text)
        if key in level.used.keys:
            return False
        self.level = _Level(level.above, True, level.place, level.used.with_item(key))
        return True
