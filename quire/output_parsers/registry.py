"""The table of dialects: how models write tool calls and reasoning, by name and by template.

A dialect is known by the marks in a model's chat template, which shows the model its own earlier
calls in the form it writes them. Always holds: what reads an answer is a function of the template's
text and of the operator's word (`choose`), never of a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from quire.output_parsers import harmony, mistral
from quire.output_parsers import key_value as keyed
from quire.output_parsers import reasoning as thinking
from quire.output_parsers.bare_json import read_bare
from quire.output_parsers.harmony import read_harmony
from quire.output_parsers.key_value import read_keyed
from quire.output_parsers.marked_json import read_listed, read_marked
from quire.output_parsers.mistral import read_mistral
from quire.output_parsers.parsed_answer import Sink
from quire.output_parsers.pythonic import read_pythonic
from quire.output_parsers.reader import Parse, Reader
from quire.output_parsers.reasoning import Marks
from quire.output_parsers.sections import DEEPSEEK, KIMI, read_sections
from quire.output_parsers.tools import Tools
from quire.output_parsers.xml_tags import BLOCK, BLOCK_ENDS, read_tags

Read = Callable[[Reader, Sink, Tools], Parse[None]]
HARMONY = "harmony"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A way to write tool calls. marks: texts that may be special tokens, which have to be seen.

    ids: the form of calls' ids: OpenAI's, or the nine letters and digits Mistral's templates want.
    """

    name: str
    read: Read
    marks: tuple[str, ...] = ()
    ids: Literal["call", "nine"] = "call"


def _marked(name: str, *opens: str, closes: str) -> Dialect:
    def read(reader: Reader, sink: Sink, tools: Tools) -> Parse[None]:
        return read_marked(reader, sink, opens=opens, closes=closes)

    return Dialect(name=name, read=read, marks=(*opens, closes))


_LISTED = ("functools",)
_PYTHON = ("<|python_start|>", "<|python_tag|>")
_PYTHON_ENDS = ("<|python_end|>",)
_LLAMA = ("<|python_tag|>",)

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        _marked("hermes", BLOCK, closes=BLOCK_ENDS),
        Dialect(name="qwen3_coder", read=read_tags, marks=(BLOCK, BLOCK_ENDS)),
        Dialect(name="glm", read=read_keyed, marks=(BLOCK, BLOCK_ENDS, *keyed.MARKS)),
        Dialect(name="llama3_json", read=partial(read_bare, marks=_LLAMA), marks=_LLAMA),
        Dialect(
            name="pythonic",
            read=partial(read_pythonic, opens=_PYTHON, closes=_PYTHON_ENDS),
            marks=_PYTHON + _PYTHON_ENDS,
        ),
        Dialect(
            name="mistral",
            read=lambda reader, sink, _: read_mistral(reader, sink),
            marks=(mistral.CALLS, mistral.ARGUMENTS, mistral.ID),
            ids="nine",
        ),
        Dialect(
            name="deepseek",
            read=lambda reader, sink, _: read_sections(reader, sink, DEEPSEEK),
            marks=DEEPSEEK.marks,
        ),
        Dialect(
            name="kimi",
            read=lambda reader, sink, _: read_sections(reader, sink, KIMI),
            marks=KIMI.marks,
        ),
        _marked("granite", "<|tool_call|>", closes="<|/tool_call|>"),
        Dialect(name="phi", read=lambda reader, sink, _: read_listed(reader, sink, opens=_LISTED)),
        Dialect(
            name=HARMONY,
            read=lambda reader, sink, _: read_harmony(reader, sink, calls=True),
            marks=harmony.MARKS,
        ),
        Dialect(name="json", read=partial(read_bare, marks=())),
    )
}
TOOL_PARSERS = ("auto", "none", *DIALECTS)
REASONING_PARSERS = ("auto", "none", *thinking.STYLES, HARMONY)

# Texts that a template has where a model writes this dialect; the first row all of whose texts
# are there counts.
_KNOWN_BY: tuple[tuple[tuple[str, ...], str], ...] = (
    ((harmony.CHANNEL, harmony.MESSAGE), HARMONY),
    ((KIMI.begins,), "kimi"),
    ((DEEPSEEK.begins,), "deepseek"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>", "<arg_value>"), "glm"),
    ((BLOCK,), "hermes"),
    ((mistral.CALLS,), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("functools",), "phi"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>ipython",), "llama3_json"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """How an answer is read. Both None: as it is."""

    reasoning: Marks | Literal["harmony"] | None
    tools: Dialect | None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that have to be seen in the answer, though they may be special tokens."""
        of_tools = self.tools.marks if self.tools is not None else ()
        if isinstance(self.reasoning, Marks):
            return (self.reasoning.opens, self.reasoning.closes, *of_tools)
        return (*(harmony.MARKS if self.reasoning == HARMONY else ()), *of_tools)


@lru_cache(maxsize=64)
def choose(template: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Reading:
    """What a template's text says, or, where that is not "auto", what the operator says.

    A template that shows no known marks is one whose model writes bare JSON, if anything.
    """
    name = tool_parser
    if name == "auto":
        found = (known for texts, known in _KNOWN_BY if all(text in template for text in texts))
        name = next(found, "json")
    style = reasoning_parser
    if style == "auto":
        style = next(
            (s for s, marks in thinking.STYLES.items() if marks.closes in template), "none"
        )
        if all(text in template for text in (harmony.CHANNEL, harmony.MESSAGE)):
            style = HARMONY
    if style == HARMONY:
        return Reading("harmony", DIALECTS.get(name))
    return Reading(thinking.STYLES.get(style), DIALECTS.get(name))
