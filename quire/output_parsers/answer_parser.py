"""Parse the streamed text of one answer into reasoning, content and tool calls.

    parser = AnswerParser(selection, tools, prompt)
    pieces = parser.push("<thi") + parser.push("nk>so ...") + parser.end()

The joined pieces depend on the whole text alone, not on where it was cut (see reader.py). The
parser handles text only: no tokens, and no API's JSON. It never raises for text a model wrote.
"""

from __future__ import annotations

from quire.output_parsers.harmony import read_harmony
from quire.output_parsers.parsed_answer import AnswerPiece, ParsedAnswer, Sink, joined
from quire.output_parsers.reader import Markers, Parse, Reader
from quire.output_parsers.reasoning import ReasoningMarks, is_open, read_thinking
from quire.output_parsers.registry import HARMONY
from quire.output_parsers.selection import ParserSelection
from quire.output_parsers.tools import Tools

_NOTHING = Markers(())


class AnswerParser:
    """Parse one answer incrementally.

    tools: the request's functions; None if it offers none, then no text is read as a call.
    prompt: the text that the answer continues, for templates that open the reasoning.
    """

    def __init__(self, reading: ParserSelection, tools: Tools | None, prompt: str) -> None:
        self._reader = Reader()
        self._sink = Sink()
        self._parse = _read(self._reader, self._sink, reading, tools, prompt)
        next(self._parse)

    def push(self, text: str) -> list[AnswerPiece]:
        """Add text and return the pieces that are certain by now."""
        self._reader.push(text)
        next(self._parse)
        return self._sink.taken()

    def end(self) -> list[AnswerPiece]:
        """End the text and return the remaining pieces."""
        self._reader.end()
        for _ in self._parse:
            raise AssertionError("a parser waits for text after the end")
        self._sink.end()
        return self._sink.taken()

    @property
    def num_calls(self) -> int:
        """Return the number of calls that have begun."""
        return self._sink.num_calls

    @property
    def is_whole(self) -> bool:
        """Return whether the last call, if any, is complete; valid after `end`."""
        return not self._sink.broken

    @property
    def reasoned(self) -> tuple[tuple[int, int], ...]:
        """Return the (start, end) characters of reasoning, marks included; valid after `end`."""
        return tuple(self._sink.reasoned)


def parse_answer(
    text: str, reading: ParserSelection, tools: Tools | None, prompt: str = ""
) -> ParsedAnswer:
    """Parse a whole text."""
    parser = AnswerParser(reading, tools, prompt)
    return joined(parser.push(text) + parser.end())


def _read(
    reader: Reader, sink: Sink, reading: ParserSelection, tools: Tools | None, prompt: str
) -> Parse[None]:
    """Parse an answer: reasoning first, then calls and content. Starts at the first text."""
    yield
    dialect = reading.tools if tools is not None else None
    if reading.reasoning == HARMONY:
        yield from read_harmony(reader, sink, calls=dialect is not None)
        return
    if isinstance(reading.reasoning, ReasoningMarks):
        opened = is_open(prompt, reading.reasoning)
        yield from read_thinking(reader, sink, reading.reasoning, opened=opened)
    if dialect is None or tools is None:
        yield from reader.until(_NOTHING, sink.content)
    else:
        yield from dialect.read(reader, sink, tools)
