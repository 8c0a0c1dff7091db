"""Register the output parsers, and select those of a model by its chat template.

A format is recognized by its marks in the template, which shows the model its earlier calls in the
form that it writes them. Invariant: the selection depends on the template's text and the operator's
flags (`select_parsers`), never on a model's name.
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
from quire.output_parsers.reasoning import ReasoningMarks
from quire.output_parsers.sections import DEEPSEEK, KIMI, read_sections
from quire.output_parsers.tools import Tools
from quire.output_parsers.xml_tags import BLOCK, BLOCK_ENDS, read_tags

Read = Callable[[Reader, Sink, Tools], Parse[None]]
HARMONY = "harmony"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """A format of tool calls. marks: texts that may be special tokens and must be kept in the text.

    ids: the format of call ids: OpenAI's, or the nine alphanumeric characters of Mistral's
    templates.
    """

    name: str
    read: Read
    marks: tuple[str, ...] = ()
    ids: Literal["call", "nine"] = "call"


def _marked(name: str, *opens: str, closes: str) -> ToolCallFormat:
    def read(reader: Reader, sink: Sink, tools: Tools) -> Parse[None]:
        return read_marked(reader, sink, opens=opens, closes=closes)

    return ToolCallFormat(name=name, read=read, marks=(*opens, closes))


_LISTED = ("functools",)
_PYTHON = ("<|python_start|>", "<|python_tag|>")
_PYTHON_ENDS = ("<|python_end|>",)
_LLAMA = ("<|python_tag|>",)

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    dialect.name: dialect
    for dialect in (
        _marked("hermes", BLOCK, closes=BLOCK_ENDS),
        ToolCallFormat(name="qwen3_coder", read=read_tags, marks=(BLOCK, BLOCK_ENDS)),
        ToolCallFormat(name="glm", read=read_keyed, marks=(BLOCK, BLOCK_ENDS, *keyed.MARKS)),
        ToolCallFormat(name="llama3_json", read=partial(read_bare, marks=_LLAMA), marks=_LLAMA),
        ToolCallFormat(
            name="pythonic",
            read=partial(read_pythonic, opens=_PYTHON, closes=_PYTHON_ENDS),
            marks=_PYTHON + _PYTHON_ENDS,
        ),
        ToolCallFormat(
            name="mistral",
            read=lambda reader, sink, _: read_mistral(reader, sink),
            marks=(mistral.CALLS, mistral.ARGUMENTS, mistral.ID),
            ids="nine",
        ),
        ToolCallFormat(
            name="deepseek",
            read=lambda reader, sink, _: read_sections(reader, sink, DEEPSEEK),
            marks=DEEPSEEK.marks,
        ),
        ToolCallFormat(
            name="kimi",
            read=lambda reader, sink, _: read_sections(reader, sink, KIMI),
            marks=KIMI.marks,
        ),
        _marked("granite", "<|tool_call|>", closes="<|/tool_call|>"),
        ToolCallFormat(
            name="phi", read=lambda reader, sink, _: read_listed(reader, sink, opens=_LISTED)
        ),
        ToolCallFormat(
            name=HARMONY,
            read=lambda reader, sink, _: read_harmony(reader, sink, calls=True),
            marks=harmony.MARKS,
        ),
        ToolCallFormat(name="json", read=partial(read_bare, marks=())),
    )
}
TOOL_PARSERS = ("auto", "none", *TOOL_CALL_FORMATS)
REASONING_PARSERS = ("auto", "none", *thinking.STYLES, HARMONY)

# Texts that identify a format in a template; the first row with all its texts present wins.
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
class ParserSelection:
    """The parsers of an answer. None: that part is not parsed."""

    reasoning: ReasoningMarks | Literal["harmony"] | None
    tools: ToolCallFormat | None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must be kept in the answer even if they are special tokens."""
        of_tools = self.tools.marks if self.tools is not None else ()
        if isinstance(self.reasoning, ReasoningMarks):
            return (self.reasoning.opens, self.reasoning.closes, *of_tools)
        return (*(harmony.MARKS if self.reasoning == HARMONY else ()), *of_tools)


@lru_cache(maxsize=64)
def select_parsers(
    template: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> ParserSelection:
    """Select the parsers by the template, or by the operator's flags unless they are "auto".

    A template without known marks selects bare JSON.
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
        return ParserSelection("harmony", TOOL_CALL_FORMATS.get(name))
    return ParserSelection(thinking.STYLES.get(style), TOOL_CALL_FORMATS.get(name))
