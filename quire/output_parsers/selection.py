"""Select the output parsers of a model by its chat template.

A format is recognized by its marks in the template, which shows the model its earlier calls in the
form that it writes them. Invariant: the selection depends on the template's text and the operator's
flags, never on a model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quire.output_parsers import harmony, mistral
from quire.output_parsers import reasoning as thinking
from quire.output_parsers.reasoning import ReasoningMarks
from quire.output_parsers.registry import HARMONY, TOOL_CALL_FORMATS, ToolCallFormat
from quire.output_parsers.sections import DEEPSEEK, KIMI
from quire.output_parsers.xml_tags import BLOCK

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
