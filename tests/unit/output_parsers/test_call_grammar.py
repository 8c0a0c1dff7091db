"""Grammars of calls, in llguidance itself, over bytes: the format of a model family, and no
more.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.output_parsers.answer_parser import parse_answer
from quire.output_parsers.call_grammar import CALL_SYNTAXES, AnswerRule, call_syntax, calls_grammar
from quire.output_parsers.registry import TOOL_CALL_FORMATS
from quire.output_parsers.selection import select_parsers
from quire.output_parsers.tools import Tools
from tests.cases import each_case
from tests.unit.output_parsers.writers import WRITERS

llguidance = pytest.importorskip("llguidance")

COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
ANY = {"type": "object", "x-guidance": COMPACT}
SCHEMAS = {"weather": CITY, "now": ANY}
ONE = [("weather", {"city": 'Os"lo', "days": 3})]
TWO = [*ONE, ("now", {})]
# Writers with a form that a grammar has; the list with ids is only read.
HELD = {
    form: WRITERS[form]
    for form in WRITERS
    if WRITERS[form][0] in CALL_SYNTAXES and "list" not in form
}
BYTES = llguidance.LLTokenizer("byte")


def template(form: str) -> str:
    return {"mistral": "[ARGS]", "deepseek, fenced": "```json"}.get(form, "")


def allows(grammar: str, text: str) -> bool:
    """Return whether the grammar allows a text as a whole answer."""
    matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(form: str, *, must: bool = True, several: bool = True, **more: Any) -> str:
    dialect = WRITERS[form][0]
    reasoning = "harmony" if dialect == "harmony" else more.pop("reasoning", "none")
    shape = call_syntax(dialect, template(form))
    assert shape is not None
    reading = select_parsers("", tool_parser=dialect, reasoning_parser=reasoning)
    options = {"reading": reading, "prompt": "", "special": {}, **more}
    return calls_grammar(shape, SCHEMAS, must=must, several=several, **options)


def written(form: str, calls: Any, content: str = "") -> str:
    text = WRITERS[form][1](content, calls)
    if form == "kimi":
        text = text.replace(":1<", ":0<")  # the number carries no meaning
    return text.removesuffix("<|call|>")


@each_case("form", HELD)
def test_a_required_call_is_one_of_the_functions_with_its_arguments(form: str) -> None:
    held = grammar(form)
    assert allows(held, written(form, ONE))
    assert allows(held, written(form, TWO)) == (form != "harmony")
    assert not allows(held, "I would rather not.")
    assert not allows(held, "")
    assert not allows(held, written(form, [("other", {})]))
    assert not allows(held, written(form, [("weather", {"city": 7})]))
    assert not allows(held, written(form, [("weather", {})]))
    assert not allows(held, written(form, [("weather", {"city": "a", "x": 1})]))
    assert not allows(held, written(form, ONE)[:-3])


@each_case("form", HELD)
def test_at_most_one_call_is_one(form: str) -> None:
    for must in (True, False):
        alone = grammar(form, must=must, several=False)
        text = written(form, ONE)
        assert not allows(alone, written(form, TWO))
        assert allows(alone, text)


@each_case("form", [form for form in HELD if form != "harmony"])
def test_optional_calls_may_follow_text(form: str) -> None:
    free = grammar(form, must=False)
    assert allows(free, "It is cold, 3 < 5 {so} [far].")
    assert allows(free, "")
    assert allows(free, written(form, TWO))
    assert not allows(free, written(form, [("other", {})]))
    if CALL_SYNTAXES[WRITERS[form][0]].trigger:
        assert allows(free, written(form, ONE, "Let me look."))
        assert not allows(free, written(form, [("weather", {"city": 7})], "Let me look."))


@each_case("form", [form for form in HELD if form != "harmony"])
def test_reasoning_may_come_first_as_the_prompt_left_it(form: str) -> None:
    text = written(form, ONE)
    for must in (True, False):
        closed = grammar(form, reasoning="think", must=must)
        assert allows(closed, text)
        assert allows(closed, f"<think>\nhm <b\n</think>\n\n{text}")
        opened = grammar(form, reasoning="think", must=must, prompt="<think>\n")
        assert allows(opened, f"hm\n</think>\n\n{text}")
        over = grammar(form, reasoning="think", prompt="<think>\n\n</think>\n\n")
        assert allows(over, text)
        assert not allows(over, f"<think>a</think>{text}")
    assert not allows(grammar(form, reasoning="think", prompt="<think>"), text)


@each_case("form", HELD)
def test_an_answer_beside_calls_has_only_its_format(form: str) -> None:
    shape: dict[str, Any] = {"properties": {"name": {"type": "string"}, "b": {}}}
    shape |= {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "x-guidance": COMPACT,
    }
    words = f"%json {json.dumps(shape)}"
    beside = grammar(form, must=False, answer=AnswerRule(words, is_json=True))
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    for text in (
        '{"name": "weather"}',
        '{"name": "we", "b": {"x": 1}}',
        '{"name": "weather", "b": 1}',
    ):
        assert allows(beside, final + text)
        assert not allows(beside, text[:-1])
    assert allows(beside, written(form, ONE))
    assert allows(beside, written(form, TWO)) == (form != "harmony")
    assert not allows(beside, written(form, [("weather", {"city": 7})]))
    for text in ("words", "", "{}", '{"b": 1}'):
        assert not allows(beside, final + text)


def test_harmony_may_reason_in_its_channel_first() -> None:
    text = written("harmony", ONE)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert allows(grammar("harmony"), thought + text)
    free = grammar("harmony", must=False)
    assert allows(free, thought + text)
    assert allows(free, thought + "<|channel|>final<|message|>It is cold.")
    assert not allows(free, thought + written("harmony", [("other", {})]))
    assert not allows(grammar("harmony"), thought)


@each_case("form", HELD)
def test_text_allowed_by_a_grammar_is_parsed_as_its_calls(form: str) -> None:
    dialect = WRITERS[form][0]
    reasoning = "harmony" if dialect == "harmony" else "none"
    reading = select_parsers("", tool_parser=dialect, reasoning_parser=reasoning)
    text = written(form, ONE)
    assert allows(grammar(form), text)
    answer = parse_answer(text, reading, Tools(SCHEMAS))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == ONE


def test_marks_that_are_special_tokens_are_named_by_their_ids() -> None:
    marks = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    for must in (True, False):
        held = grammar("hermes", must=must, reasoning="think", special=marks)
        for mark, id_ in marks.items():
            assert f"<[{id_}]>" in held
            assert mark not in held
        matcher = llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_lark(held))
        assert not matcher.is_error(), matcher.get_error()


def test_a_schema_cannot_inject_grammar() -> None:
    odd = {**ANY, "properties": {'a::=b "\n': {"enum": ['root ::= "x"']}}}
    reading = select_parsers("", tool_parser="json")
    shape = call_syntax("json", "")
    assert shape is not None
    held = calls_grammar(
        shape, {"now": odd}, must=True, several=False, reading=reading, prompt="", special={}
    )
    assert "::=" not in held
    assert allows(held, '[{"name": "now", "arguments": {"a::=b \\"\\n": "root ::= \\"x\\""}}]')


def test_formats_without_a_grammar_are_those_with_non_json_values() -> None:
    assert set(TOOL_CALL_FORMATS) - set(CALL_SYNTAXES) == {"qwen3_coder", "glm", "pythonic"}
