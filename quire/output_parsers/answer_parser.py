"""AnswerParser: the text of one answer, as it comes, to what it says: reasoning, content, calls.

    parser = AnswerParser(reading, tools, prompt)
    pieces = parser.push("<thi") + parser.push("nk>so ...") + parser.end()

The pieces joined are a function of the whole text alone, wherever it was cut (reader.py). Knows no
tokens and no JSON of any API. Never raises for what a model wrote.
"""

from __future__ import annotations

from quire.output_parsers.harmony import read_harmony
from quire.output_parsers.parsed_answer import AnswerPiece, ParsedAnswer, Sink, joined
from quire.output_parsers.reader import Markers, Parse, Reader
from quire.output_parsers.reasoning import Marks, is_open, read_thinking
from quire.output_parsers.registry import HARMONY, Reading
from quire.output_parsers.tools import Tools

_NOTHING = Markers(())


class AnswerParser:
    """One answer. tools: of the request; None where it offers none, then nothing is a call.

    prompt: the text the answer continues, for models whose template opens their reasoning.
    """

    def __init__(self, reading: Reading, tools: Tools | None, prompt: str) -> None:
        self._reader = Reader()
        self._sink = Sink()
        self._parse = _read(self._reader, self._sink, reading, tools, prompt)
        next(self._parse)

    def push(self, text: str) -> list[AnswerPiece]:
        """More of the text; what it says, as far as that is certain."""
        self._reader.push(text)
        next(self._parse)
        return self._sink.taken()

    def end(self) -> list[AnswerPiece]:
        """The text has ended: the rest of what it says."""
        self._reader.end()
        for _ in self._parse:
            raise AssertionError("a parser asks for more than there is")
        self._sink.end()
        return self._sink.taken()

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._sink.num_calls

    @property
    def is_whole(self) -> bool:
        """Whether the last call, if there is one, has ended; known after `end`."""
        return not self._sink.broken

    @property
    def reasoned(self) -> tuple[tuple[int, int], ...]:
        """Where the text reasons, marks included: (first, end) characters; known after `end`."""
        return tuple(self._sink.reasoned)


def parsed(text: str, reading: Reading, tools: Tools | None, prompt: str = "") -> ParsedAnswer:
    """What a whole text says."""
    parser = AnswerParser(reading, tools, prompt)
    return joined(parser.push(text) + parser.end())


def _read(
    reader: Reader, sink: Sink, reading: Reading, tools: Tools | None, prompt: str
) -> Parse[None]:
    """All of an answer. Waits for the first text before it does anything."""
    yield
    dialect = reading.tools if tools is not None else None
    if reading.reasoning == HARMONY:
        yield from read_harmony(reader, sink, calls=dialect is not None)
        return
    if isinstance(reading.reasoning, Marks):
        opened = is_open(prompt, reading.reasoning)
        yield from read_thinking(reader, sink, reading.reasoning, opened=opened)
    if dialect is None or tools is None:
        yield from reader.until(_NOTHING, sink.content)
    else:
        yield from dialect.read(reader, sink, tools)
