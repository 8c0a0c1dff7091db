"""Reasoning between two marks at the beginning of an answer: <think> ... </think> and its like.

The first mark is written by the template or by the model; without it there is no reasoning. What
comes behind the second is left to whoever reads on. Later marks are content like any other text.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader


@dataclass(frozen=True, slots=True)
class Marks:
    """The two marks of a dialect."""

    opens: str
    closes: str


THINK = Marks("<think>", "</think>")
STYLES = {
    "think": THINK,
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "kimi": Marks("◁think▷", "◁/think▷"),
}


def is_open(prompt: str, marks: Marks) -> bool:
    """Whether the answer to a prompt begins within reasoning: the prompt ends with its mark."""
    return prompt.rstrip().endswith(marks.opens)


def read_thinking(reader: Reader, sink: Sink, marks: Marks, *, opened: bool) -> Parse[None]:
    """Reasoning, if there is any. opened: the mark stands at the end of the prompt."""
    begun_at = reader.at_chars
    if not (yield from reader.opens_with(marks.opens)) and not opened:
        return
    yield from reader.until(Markers((marks.closes,)), sink.reasoning)
    sink.reasoned.append((begun_at, reader.at_chars))
    sink.border()
