"""AnswerReading: how the answers to one conversation are read: their reasoning, content and calls.

    reading = answer_reading_of(text_side, prompt, settings)
    reading.message(text).calls

Knows the template and the tools that the conversation was rendered with, and quire/output_parsers;
no JSON of any API. Always holds: a text is parsed as by the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.client.tokenizer_side import TokenizerSide
from quire.engine.output.output_stream import TextRules
from quire.output_parsers.answer_parser import parse_answer
from quire.output_parsers.parsed_answer import ParsedAnswer as Reply
from quire.output_parsers.selection import ParserSelection, select_parsers
from quire.output_parsers.tools import Tools
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """tools: None where none were offered. prompt: its end shows whether reasoning is open."""

    reading: ParserSelection
    tools: Tools | None
    prompt: str

    def text_rules(self, tokenizer: Tokenizer) -> TextRules:
        """Return what has to be seen of answers."""
        return TextRules(shown_ids=shown_ids(self.reading, self.tools, tokenizer))

    def message(self, text: str) -> Reply:
        """Return what a whole text says."""
        return parse_answer(text, self.reading, self.tools, self.prompt)


def answer_reading_of(
    text_side: TokenizerSide, prompt: str, settings: Mapping[str, Any]
) -> AnswerReading:
    """For a conversation that was rendered to `prompt`; settings: as LLM.chat takes them."""
    template, tools = text_side.template, settings.get("tools") or None
    assert template is not None, "it rendered the prompt"
    source = template.source(tools=tools, chat_template=settings.get("chat_template"))
    return AnswerReading(select_parsers(source), None if tools is None else _tools(tools), prompt)


def shown_ids(
    reading: ParserSelection, tools: Tools | None, tokenizer: Tokenizer
) -> frozenset[int]:
    """Return the special tokens to keep in the text: the marks that the parsers read."""
    if reading.reasoning is None and tools is None:
        return frozenset()
    ids = (tokenizer.token_id(mark) for mark in reading.marks)
    return frozenset(id_ for id_ in ids if id_ is not None and id_ in tokenizer.special_ids)


def _tools(listed: Any) -> Tools:
    """Return functions as OpenAI writes them, or as schemas alone."""
    functions = [tool.get("function", tool) for tool in listed if isinstance(tool, Mapping)]
    return Tools(
        {
            str(function["name"]): function.get("parameters") or {}
            for function in functions
            if isinstance(function, Mapping) and "name" in function
        }
    )
