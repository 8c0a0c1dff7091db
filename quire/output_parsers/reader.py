"""Reader: the characters of a text that comes in pieces, for parsers written as generators.

    character = yield from reader.char()     # waits for the next piece where need be; "" at the end

A parser is given one character after the other and cannot see where the text was cut, so what it
makes of a text cannot depend on that. `plain` gives several at once, for text that is passed on as
it is: whoever calls it must do the same with a run as with its halves. Knows no dialect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
"""A parse under way: it yields where it needs more text, and returns a T."""

SPACE = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


class Markers:
    """Some strings to look for, none of them the beginning of another. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self.openings = frozenset(
            text[:length] for text in self.texts for length in range(1, len(text) + 1)
        )
        firsts = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")


class Reader:
    """One text. `at_chars`: how many of its characters have been taken."""

    def __init__(self) -> None:
        self.at_chars = 0
        self._text = ""
        self._at = 0
        self._ended = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """More of the text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """There is no more of it."""
        self._ended = True

    def record(self) -> None:
        """Keep what is taken from here on."""
        self._recorded = []

    def recorded(self) -> str:
        """What was taken since `record`; keeps no more."""
        text = "".join(self._recorded or ())
        self._recorded = None
        return text

    def unread(self, text: str) -> None:
        """Give back what was taken last."""
        self._text = text + self._text[self._at :]
        self._at = 0
        self.at_chars -= len(text)

    def peek(self) -> Parse[str]:
        """The next character, which stays where it is; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def char(self) -> Parse[str]:
        """The next character; "" at the end."""
        character = yield from self.peek()
        self._take(character)
        return character

    def plain(self, stop: re.Pattern[str]) -> str:
        """The characters that are there, up to the first that `stop` matches; may be none."""
        found = stop.search(self._text, self._at)
        run = self._text[self._at : found.start() if found else len(self._text)]
        self._take(run)
        return run

    def space(self) -> Parse[str]:
        """Takes white space; the character behind it, which stays where it is; "" at the end."""
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
        """Text to `out` up to the first marker, which is taken and returned; "" at the end.

        unfinished: takes the beginning of a marker at the end of the text; by default `out` does.
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
        """Whether `text` comes next, white space aside; takes both where it does, else neither."""
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
    """For text that is nothing to anybody."""
