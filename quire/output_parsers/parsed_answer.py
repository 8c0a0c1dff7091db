"""Represent a parsed answer, whole and as streamed pieces: reasoning, content, tool calls.

Parsers write to a `Sink`. White space at borders (between reasoning and content, before a call,
after the last one) belongs to the format and is dropped; all other text is kept as it is.
Invariant: the joined pieces are the answer, and a call's name comes once, before its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

PHASES = ("commentary", "final_answer")  # OpenAI's names
Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer.

    text: of a call, its function's name. call: index of the call, from 0. phase: of content, if
    the model names it: of PHASES.
    """

    kind: Kind
    text: str
    call: int = -1
    phase: str = ""


@dataclass(slots=True)
class Call:
    """A tool call. arguments: the text of a JSON object where the model wrote one."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
    """Join pieces into the whole answer."""
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
    """Collect what a parser finds; `taken` returns it as pieces.

    num_calls: calls that have begun. broken: the text ended, or became invalid, before the last
    call was complete. reasoned: (start, end) character ranges of reasoning, marks included.
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
        self._phase = ""

    def taken(self) -> list[AnswerPiece]:
        """Return the pieces since the last call of this method."""
        self._close()
        pieces, self._pieces = self._pieces, []
        return pieces

    def reasoning(self, text: str) -> None:
        """Add reasoning. Trailing white space is buffered until more follows."""
        self._say("reasoning", text, keeps_opening=False)

    def content(self, text: str) -> None:
        """Add content."""
        self._say("content", text, keeps_opening=not self._bordered)
        if not text.isspace():
            self._bordered = False

    def border(self) -> None:
        """Mark a border of content: white space here belongs to the format and is dropped."""
        self._space["content"] = ""
        self._bordered = True

    def paragraph(self, kind: Literal["content", "reasoning"], phase: str = "") -> None:
        """Begin a new paragraph: a line break precedes it unless it is the first.

        phase: of content.
        """
        if kind == "content" and phase != self._phase:
            self._close()
            self._phase = phase
        self._bordered = True
        self._space[kind] = "\n" if self._spoken[kind] else ""

    def unfinished(self, text: str) -> None:
        """Add the beginning of a call that the end of the answer cut off.

        It becomes content, so that nothing is lost; after a complete call it is markup and dropped.
        """
        if not self.num_calls:
            self.content(text)

    def begin(self, name: str) -> None:
        """Begin a call."""
        self.border()
        self._close()
        self._pieces.append(AnswerPiece("call", name, self.num_calls))
        self.num_calls += 1
        self.broken = False

    def arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        if text:
            self._put("arguments", text)

    def end(self) -> None:
        """End the answer."""
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
            phase = self._phase if self._kind == "content" else ""
            self._pieces.append(AnswerPiece(self._kind, "".join(self._parts), call, phase))
            self._parts = []
