"""Unescape the strings of a large JSON text in pieces, so that other threads run in between.

Python's JSON parser holds the interpreter lock while it reads strings, and an escape takes as long
as tens of plain bytes. Here every string with escapes is read in pieces and replaced by a short
one without; after parsing, `Unescaped.restored` puts the long ones back. Invariant: the document
is the one that the parser returns for the whole text, or the text is rejected.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.base.show import show

# A text with fewer escapes is parsed as it is: a few milliseconds.
MAX_ESCAPES = 100_000
SLICE_BYTES = 64 * 1024
_PIECE_BYTES = 16 * 1024
_QUOTE = ord('"')


def slices(raw: bytes) -> Iterator[bytes]:
    """Yield a text in slices, none of which ends between a backslash and what that escapes."""
    position = 0
    while position < len(raw):
        piece = raw[position : position + SLICE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2:
            piece = piece[:-1] or raw[position : position + 2]
        position += len(piece)
        yield piece


def overlapping(raw: bytes) -> Iterator[bytes]:
    """Yield a text in slices, each with the begin of the next: an escape is whole in one."""
    for position in range(0, len(raw), SLICE_BYTES):
        yield raw[position : position + SLICE_BYTES + 5]


def has_many_escapes(raw: bytes) -> bool:
    """Return whether the escapes of a text would hold the interpreter lock for long."""
    num_escapes = 0
    for position in range(0, len(raw), SLICE_BYTES):
        num_escapes += raw.count(b"\\", position, position + SLICE_BYTES)
        if num_escapes > MAX_ESCAPES:
            return True
    return False


class Unescaped:
    """text: with a short string in place of each that has escapes. Raises ValueError."""

    def __init__(self, raw: bytes) -> None:
        self._mark = secrets.token_hex(8)
        self._strings: dict[str, str] = {}
        self._names: dict[str, str] = {}  # equal strings have one name: keys are compared
        text, at = bytearray(), 0
        for start, end in _strings_of(raw):
            if raw.find(b"\\", start, end) >= 0:
                text += raw[at : start + 1]
                text += self._name(_unescaped(raw, start + 1, end)).encode()
                at = end
        text += raw[at:]
        self.text = bytes(text)

    def _name(self, text: str) -> str:
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = f"{self._mark}{len(self._names)}"
            self._strings[name] = text
        return name

    def described(self, message: str) -> str:
        """Return an error message with the strings of the text."""
        quoted = re.compile(f'"({self._mark}[0-9]+)"')
        return quoted.sub(lambda found: show(self._strings[found[1]]), message)

    def restored(self, document: Any) -> Any:
        """Return the document with the strings of the text, changed in place."""
        top: list[Any] = [document]
        waiting: list[Any] = [top]
        while waiting:
            level = waiting.pop()
            if isinstance(level, dict):
                if any(key in self._strings for key in level):
                    items = [(self._strings.get(key, key), value) for key, value in level.items()]
                    if len(dict(items)) < len(items):
                        keys = [key for key, _ in items]
                        twice = next(key for key in keys if keys.count(key) > 1)
                        raise ValueError(f"key {show(twice)} is given twice; keep one")
                    level.clear()
                    level.update(items)
                places: Any = level
            else:
                places = range(len(level))
            for place in places:
                value = level[place]
                if isinstance(value, str):
                    if value in self._strings:
                        level[place] = self._strings[value]
                elif isinstance(value, dict | list):
                    waiting.append(value)
        return top[0]


def _strings_of(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield the positions of the quotes around each string. Raises ValueError if one is open."""
    position, start = 0, -1
    for piece in slices(raw):
        plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in piece else piece
        for place in (np.frombuffer(plain, np.uint8) == _QUOTE).nonzero()[0].tolist():
            if start < 0:
                start = position + place
            else:
                yield start, position + place
                start = -1
        position += len(piece)
    if start >= 0:
        raise ValueError(f"it is not JSON: the string that begins at byte {start} does not end")


def _unescaped(raw: bytes, start: int, end: int) -> str:
    """Return the text of a string's inside, read in pieces."""
    parts: list[str] = []
    while start < end:
        stop = _stop(raw, start, end)
        try:
            part = json.loads(b'"%b"' % raw[start:stop])
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 (byte {start + error.start - 1})") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"it is not JSON: {error.msg} in the string at byte {start}"
            ) from error
        if parts and "\ud800" <= parts[-1][-1] <= "\udbff" and "\udc00" <= part[0] <= "\udfff":
            pair = parts[-1][-1] + part[0]  # cut between the halves of a character
            parts[-1] = parts[-1][:-1]
            part = pair.encode("utf-16", "surrogatepass").decode("utf-16") + part[1:]
        parts.append(part)
        start = stop
    return "".join(parts)


def _stop(raw: bytes, start: int, end: int) -> int:
    """Return where a piece that begins at `start` ends: not within a character or an escape."""
    stop = start + _PIECE_BYTES
    if stop >= end:
        return end
    while raw[stop] & 0xC0 == 0x80 and stop > start + 1:
        stop -= 1
    for place in range(stop - 1, max(start, stop - 6), -1):
        head = raw[start : place + 1]
        if (len(head) - len(head.rstrip(b"\\"))) % 2:  # the last escape before the end
            length = 6 if raw[place + 1 : place + 2] == b"u" else 2
            return place if place + length > stop else stop
    return stop
