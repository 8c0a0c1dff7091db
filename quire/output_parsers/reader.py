"""Read a streamed text character by character, for parsers written as generators.

    character = yield from reader.char()     # waits for the next chunk if needed; "" at the end

A parser receives one character at a time and cannot see where the text was cut, so its result
cannot depend on the cuts. `plain` returns a run of characters at once, for text that is passed on
unchanged; callers must handle a run the same way as its parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
"""A parser in progress: it yields to wait for more text and returns a T."""

SPACE = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class Markers:
    """An immutable set of strings to search for. None may be a prefix of another."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self.openings = frozenset(
            text[:length] for text in self.texts for length in range(1, len(text) + 1)
        )
        firsts = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")


class Reader:
    """Read one text. at_chars: number of characters consumed."""

    def __init__(self) -> None:
        self.at_chars = 0
        self._text = ""
        self._at = 0
        self._ended = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """Add a chunk of text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def record(self) -> None:
        """Start recording consumed characters."""
        self._recorded = []

    def recorded(self) -> str:
        """Stop recording and return the characters consumed since `record`."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def unread(self, text: str) -> None:
        """Put back the characters consumed last."""
        self._text = text + self._text[self._at :]
        self._at = 0
        self.at_chars -= len(text)

    def peek(self) -> Parse[str]:
        """Return the next character without consuming it; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def char(self) -> Parse[str]:
        """Consume and return the next character; "" at the end."""
        character = yield from self.peek()
        self._take(character)
        return character

    def plain(self, stop: re.Pattern[str]) -> str:
        """Consume available characters up to the first match of `stop`; may return ""."""
        found = stop.search(self._text, self._at)
        run = self._text[self._at : found.start() if found else len(self._text)]
        self._take(run)
        return run

    def space(self) -> Parse[str]:
        """Skip white space and return the next character without consuming it; "" at the end."""
        while True:
            self.plain(_NOT_SPACE)
            character = yield from self.peek()
            if character not in SPACE or not character:
                return character

    def until(
        self,
        markers: Markers,
        out: Callable[[str], None],
        unfinished: Callable[[str], None] | None = None,
    ) -> Parse[str]:
        """Pass text to `out` up to the first marker; consume and return it, or "" at the end.

        unfinished: receives the beginning of a marker at the end of the text, in place of `out`.
        """
        held = ""
        while True:
            if not held:
                run = self.plain(markers.first)
                if run:
                    out(run)
            character = yield from self.char()
            if not character:
                if held:
                    (unfinished or out)(held)
                return ""
            held += character
            while held and held not in markers.openings:
                out(held[0])
                held = held[1:]
            if held in markers.texts:
                return held

    def opens_with(self, text: str) -> Parse[bool]:
        """Return whether `text` follows optional white space; consume both only if it does."""
        self.record()
        yield from self.space()
        for expected in text:
            if (yield from self.peek()) != expected:
                self.unread(self.recorded())
                return False
            yield from self.char()
        self.recorded()
        return True

    def _take(self, text: str) -> None:
        self._at += len(text)
        self.at_chars += len(text)
        if self._recorded is not None and text:
            self._recorded.append(text)


def ignore(text: str) -> None:
    """Discard text."""
