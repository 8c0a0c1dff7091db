"""Answers in each family's format: the result, for any division of the stream."""

from __future__ import annotations

import json
from typing import Any

from quire.output_parsers.registry import TOOL_CALL_FORMATS
from tests.cases import each_case
from tests.drawn import examples
from tests.unit.output_parsers.cuts import everywhere, reading, said_in
from tests.unit.output_parsers.writers import WRITERS, Calls

# The content before the calls, and the calls.
SAID: dict[str, tuple[str, Calls]] = {
    "words alone": ("The sea is blue today.", []),
    "words with brackets": ("Use f(x) = {x} or [1, 2] <b>so</b>.", []),
    "a call": ("", [("weather", {"city": "Oslo"})]),
    "a call behind words": ("Let me look.", [("weather", {"city": "Oslo"})]),
    "no arguments": ("", [("now", {})]),
    "two calls": ("", [("weather", {"city": "Oslo"}), ("weather", {"city": "Bergen"})]),
    "three calls of different functions": (
        "One moment:",
        [("now", {}), ("add", {"number": 1.5, "days": -3}), ("look_up", {"text": "x"})],
    ),
    "nested objects": (
        "",
        [("look_up", {"where": {"in": {"deep": [{"er": {}}, []]}, "x": None}})],
    ),
    "lists of lists": ("", [("look_up", {"tags": [[1, [2, [3]]], ["a", ["b"]], []]})]),
    "quotes and backslashes": ("", [("look_up", {"text": 'say "hi" \\ and \\" twice'})]),
    "line breaks and tabs": ("", [("look_up", {"text": "one\ntwo\n\n\tthree"})]),
    "brackets in text": ("", [("look_up", {"text": "}] {[ }}", "note": '{"a": 1}'})]),
    "accents": ("Voilà…", [("weather", {"city": "Tromsø"})]),
    "Japanese": ("天気を調べます。", [("weather", {"city": "東京"})]),
    "beyond the first plane": ("🦙", [("look_up", {"text": "a🌍b", "note": "👩‍🚀"})]),
    "numbers": ("", [("add", {"number": -1.25e-05, "days": 0, "any": 12})]),
    "truth": ("", [("look_up", {"exact": True, "nothing": None, "tags": [True, False, None]})]),
    "a long text": ("", [("look_up", {"text": "word " * 40 + "end"})]),
    "an empty text": ("", [("look_up", {"text": "", "tags": [], "where": {}})]),
    "a name of many kinds": ("", [("files.read-all_2", {"text": "/tmp/a b.txt"})]),
    "what looks like marks": ("", [("look_up", {"text": "<tool_cal> </tool functions [TOOL"})]),
    "arguments that name names": (
        "",
        [("look_up", {"where": {"name": "weather", "arguments": {"city": "no"}}})],
    ),
    "code": ("", [("look_up", {"text": "def f(x):\n    return {'a': [x, \"y\"]}  # ok"})]),
    "a single character": ("", [("look_up", {"text": "<"})]),
}


def can_write(form: str, said: str) -> bool:
    """Return whether a format has names like those of the calls: Python's have no hyphen."""
    return form != "pythonic" or not any("-" in name for name, _ in SAID[said][1])


@each_case(
    "form, said", [(form, said) for form in WRITERS for said in SAID if can_write(form, said)]
)
def test_written_answers_are_parsed_back(form: str, said: str) -> None:
    content, calls = SAID[said]
    dialect, write = WRITERS[form]
    if form == "json" and calls:
        content = ""  # it has no mark that could follow content
    text = write(content, calls)
    answer, is_whole, _ = everywhere(text, reading(dialect), most=examples(400))
    assert answer.content == content
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        (name, arguments) for name, arguments in calls
    ]
    assert is_whole
    assert answer.reasoning == ""


def test_every_format_is_covered() -> None:
    assert {dialect for dialect, _ in WRITERS.values()} == set(TOOL_CALL_FORMATS)
    assert len(SAID) >= 20


@each_case("form", [form for form in WRITERS if WRITERS[form][0] not in ("qwen3_coder", "glm")])
def test_json_arguments_pass_unchanged(form: str) -> None:
    arguments: dict[str, Any] = {"where": {"b": 1, "a": [1, 2]}}
    dialect, write = WRITERS[form]
    answer, _, _ = everywhere(write("", [("look_up", arguments)]), reading(dialect))
    assert answer.calls[0].arguments == json.dumps(arguments)


@each_case("form", WRITERS)
def test_a_truncated_answer_keeps_its_beginning(form: str) -> None:
    """Arguments grow with the text: those of a shorter text are a prefix of those of a
    longer one.
    """
    dialect, write = WRITERS[form]
    text = write("", [("look_up", {"text": 'a "b" \\ c', "tags": [1, {"x": "}"}]})])
    before = ""
    for length in range(len(text) + 1):
        answer, is_whole, _ = said_in([text[:length]], reading(dialect))
        assert len(answer.calls) <= 1
        if answer.calls and not is_whole and dialect not in ("pythonic", "qwen3_coder", "glm"):
            assert answer.calls[0].arguments.startswith(before)
            before = answer.calls[0].arguments
        if not answer.calls and dialect not in ("harmony", "deepseek", "kimi"):
            assert "".join(answer.content.split()) == "".join(text[:length].split())
    assert is_whole
    assert len(answer.calls) == 1


@each_case("form", WRITERS)
def test_a_truncated_second_call_leaves_no_markup_in_the_content(form: str) -> None:
    dialect, write = WRITERS[form]
    first = ("weather", {"city": "Oslo"})
    text = write("", [first, ("add", {"number": 1})])
    num_cut = 0
    for length in range(len(text) + 1):
        answer, _, _ = said_in([text[:length]], reading(dialect))
        if not answer.calls or 'Oslo"' not in answer.calls[0].arguments:
            continue
        num_cut += 1
        assert answer.content == ""
        assert answer.calls[0].name == "weather"
    assert num_cut >= 10
    assert [call.name for call in answer.calls] == ["weather", "add"]


def test_a_harmony_call_is_complete_if_its_arguments_are() -> None:
    """A grammar ends a forced call with its arguments: no mark follows."""
    dialect, write = WRITERS["harmony"]
    text = write("", [("add", {"number": 12})]).removesuffix("<|call|>")
    answer, is_whole, _ = said_in([text], reading(dialect))
    assert (answer.calls[0].arguments, is_whole) == ('{"number": 12}', True)
    _, is_whole, _ = said_in([text[:-1]], reading(dialect))
    assert not is_whole
