"""The answer parser: special tokens that mark reasoning or calls are kept for parsing."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.client.tokenizer_side import TokenizerSide
from quire.engine.output.answer_parser import answer_reading_of
from quire.text.chat_template import ChatTemplate
from tests.unit.api.fake_engine import ByteTokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{# <tool_call> #}"
THINKS = f"{TEMPLATE}{{# </think> #}}"
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("source", "tools", "shown"),
    [
        (TEMPLATE, None, []),
        (TEMPLATE, TOOLS, ["<tool_call>"]),
        (THINKS, None, ["<think>", "<tool_call>"]),
        (THINKS, TOOLS, ["<think>", "<tool_call>"]),
    ],
)
def test_marks_are_visible_where_they_are_parsed(source: str, tools: Any, shown: list[str]) -> None:
    tokenizer: Any = ByteTokenizer(marks=("<think>", "<tool_call>", "<other>"))
    side = TokenizerSide(
        tokenizer=tokenizer, template=ChatTemplate({"default": source}, variables={})
    )
    reading = answer_reading_of(side, "a", {"tools": tools})
    rules = reading.text_rules(tokenizer)
    assert rules.shown_ids == {tokenizer.marks[mark] for mark in shown}


def test_the_selected_template_and_the_prompts_end_select_the_parser() -> None:
    sources = {"default": TEMPLATE, "thinks": THINKS}
    side = TokenizerSide(tokenizer=ByteTokenizer(), template=ChatTemplate(sources, variables={}))  # type: ignore[arg-type]
    text = "so</think>four"
    assert answer_reading_of(side, "a<think>", {}).message(text).content == text
    named = {"chat_template": "thinks"}
    assert answer_reading_of(side, "a", named).message(text).content == text
    message = answer_reading_of(side, "a<think>\n", named).message(text)
    assert (message.reasoning, message.content, message.calls) == ("so", "four", [])
