"""The formats of tool calls, and the names of the reasoning parsers.

selection.py selects those of a model. To add a format, add an entry to TOOL_CALL_FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
