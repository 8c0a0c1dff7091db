"""Divide a text everywhere: the result for the pieces must be that of the whole.

answer = everywhere(text, reading)    # every cut in two, every character alone, at random
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from quire.output_parsers.answer_parser import AnswerParser, parse_answer
from quire.output_parsers.parsed_answer import AnswerPiece, ParsedAnswer, joined
from quire.output_parsers.selection import ParserSelection, select_parsers
from quire.output_parsers.tools import Tools
from tests.unit.output_parsers.writers import TOOLS

State = tuple[ParsedAnswer, bool, tuple[tuple[int, int], ...]]


def reading(tools: str = "none", reasoning: str = "none") -> ParserSelection:
    if tools == "harmony":
        reasoning = "harmony"
    return select_parsers("", tool_parser=tools, reasoning_parser=reasoning)


def said_in(
    pieces: Iterable[str], how: ParserSelection, tools: Tools | None = TOOLS, prompt: str = ""
) -> State:
    """Return everything a parser reports for a text in these pieces."""
    parser = AnswerParser(how, tools, prompt)
    said: list[AnswerPiece] = []
    for piece in pieces:
        said += parser.push(piece)
        assert all(part.text or part.kind == "call" for part in said)
    said += parser.end()
    return joined(said), parser.is_whole, parser.reasoned


def everywhere(
    text: str,
    how: ParserSelection,
    tools: Tools | None = TOOLS,
    prompt: str = "",
    *,
    most: int = 400,
) -> State:
    """Return the parsed text, after dividing it everywhere (a long text at `most` places)."""
    whole = said_in([text], how, tools, prompt)
    assert parse_answer(text, how, tools, prompt) == whole[0]
    draw = random.Random(len(text))
    places: Sequence[int] = range(len(text) + 1)
    if len(places) > most:
        places = sorted(draw.sample(places, most))
    for place in places:
        halves = [text[:place], text[place:]]
        assert said_in(halves, how, tools, prompt) == whole, f"cut at {place}"
    assert said_in(text, how, tools, prompt) == whole, "each character alone"
    for _ in range(8):
        edges = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randint(1, 12))))
        edges = [0, *edges, len(text)]
        pieces = [text[low:high] for low, high in itertools.pairwise(edges)]
        assert said_in(pieces, how, tools, prompt) == whole, f"cut at {edges}"
    return whole
