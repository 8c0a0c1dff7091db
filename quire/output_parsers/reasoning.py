"""Parse reasoning between two marks at the beginning of an answer, such as <think> ... </think>.

The template or the model writes the first mark; without it there is no reasoning. The caller parses
what follows the second mark. Marks that occur later are content.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.reader import Markers, Parse, Reader


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks that enclose reasoning."""

    opens: str
    closes: str


THINK = ReasoningMarks("<think>", "</think>")
STYLES = {
    "think": THINK,
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
    "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
}


def is_open(prompt: str, marks: ReasoningMarks) -> bool:
    """Return whether the prompt ends with the opening mark: its answer starts in reasoning."""
    return prompt.rstrip().endswith(marks.opens)


def read_thinking(
    reader: Reader, sink: Sink, marks: ReasoningMarks, *, opened: bool
) -> Parse[None]:
    """Parse reasoning, if any. opened: the prompt ends with the opening mark."""
    begun_at = reader.at_chars
    if not (yield from reader.opens_with(marks.opens)) and not opened:
        return
    yield from reader.until(Markers((marks.closes,)), sink.reasoning)
    sink.reasoned.append((begun_at, reader.at_chars))
    sink.border()
