"""What an answer says: its reasoning, its content, its tool calls; whole, and piece by piece.

`Sink` is where a parser puts what it finds. White space at a border (between reasoning and
content, before a call, after the last one) belongs to the form and is left out; all other text is
kept as it is. Knows no dialect. Always holds: the pieces joined are the answer, and a call begins
with its name, once, before its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer. text: of a call its function's name. call: which call, from 0."""

    kind: Kind
    text: str
    call: int = -1


@dataclass(slots=True)
class Call:
    """A tool call. arguments: the text of a JSON object where the model wrote one."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All pieces put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
    """The answer that pieces make."""
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append((piece.text, []))
        elif piece.kind == "arguments":
            calls[piece.call][1].append(piece.text)
        else:
            texts[piece.kind].append(piece.text)
    return ParsedAnswer(
        reasoning="".join(texts["reasoning"]),
        content="".join(texts["content"]),
        calls=[Call(name, "".join(arguments)) for name, arguments in calls],
    )


class Sink:
    """Takes what a parser finds; `taken` gives it out in pieces.

    num_calls: that have begun. broken: the last call's text ended, or stopped making sense, before
    the call did. reasoned: where the text reasons, as (first, end) characters, marks included.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.broken = False
        self.reasoned: list[tuple[int, int]] = []
        self._pieces: list[AnswerPiece] = []
        self._kind: Kind = "content"
        self._parts: list[str] = []
        self._space: dict[Kind, str] = {"content": "", "reasoning": ""}
        self._spoken: dict[Kind, bool] = {"content": False, "reasoning": False}
        self._bordered = False

    def taken(self) -> list[AnswerPiece]:
        """The pieces since the last time."""
        self._close()
        pieces, self._pieces = self._pieces, []
        return pieces

    def reasoning(self, text: str) -> None:
        """More reasoning. White space is held until something follows it."""
        self._say("reasoning", text, keeps_opening=False)

    def content(self, text: str) -> None:
        """More content."""
        self._say("content", text, keeps_opening=not self._bordered)
        if not text.isspace():
            self._bordered = False

    def border(self) -> None:
        """Something else than content is next: white space here is part of the form."""
        self._space["content"] = ""
        self._bordered = True

    def paragraph(self, kind: Literal["content", "reasoning"]) -> None:
        """What follows is a part of its own: a line break stands before it."""
        self._bordered = True
        self._space[kind] = "\n" if self._spoken[kind] else ""

    def unfinished(self, text: str) -> None:
        """Take the beginning of a call that the end of the answer cut off.

        It is content, so that nothing is lost; after a whole call it is markup, and dropped.
        """
        if not self.num_calls:
            self.content(text)

    def begin(self, name: str) -> None:
        """A call begins."""
        self.border()
        self._close()
        self._pieces.append(AnswerPiece("call", name, self.num_calls))
        self.num_calls += 1
        self.broken = False

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._put("arguments", text)

    def end(self) -> None:
        """The text has ended."""
        if not self._bordered and self._space["content"]:
            self._put("content", self._space["content"])
        self._space = {"content": "", "reasoning": ""}

    def _say(
        self, kind: Literal["reasoning", "content"], text: str, *, keeps_opening: bool
    ) -> None:
        said = text.rstrip()
        if not said:
            self._space[kind] += text
            return
        if keeps_opening or self._spoken[kind]:
            self._put(kind, self._space[kind] + said)
        else:
            self._put(kind, said.lstrip())
        self._space[kind] = text[len(said) :]
        self._spoken[kind] = True

    def _put(self, kind: Kind, text: str) -> None:
        if kind != self._kind:
            self._close()
            self._kind = kind
        self._parts.append(text)

    def _close(self) -> None:
        if self._parts:
            call = self.num_calls - 1 if self._kind == "arguments" else -1
            self._pieces.append(AnswerPiece(self._kind, "".join(self._parts), call))
            self._parts = []
