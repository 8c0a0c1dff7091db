"""Reasoning: between marks of each style, opened by the model or by the template, and channels."""

from __future__ import annotations

from quire.output_parsers.answer_parser import parse_answer
from quire.output_parsers.reasoning import STYLES
from quire.output_parsers.registry import HARMONY, REASONING_PARSERS
from tests.cases import each_case
from tests.unit.output_parsers.cuts import everywhere, reading
from tests.unit.output_parsers.writers import TOOLS

OPENS = "[opens]"  # stands for the style's own marks
CLOSES = "[closes]"

# prompt's end, text, reasoning, content
THOUGHT: list[tuple[str, str, str, str]] = [
    ("", "[opens]so[closes]yes", "so", "yes"),
    ("", "[opens]\nso\n[closes]\n\nyes", "so", "yes"),
    ("", "\n[opens]\nso", "so", ""),
    ("", "[opens][closes]yes", "", "yes"),
    ("", "[opens]\n\n[closes]\n\nyes\n", "", "yes\n"),
    ("", "yes", "", "yes"),
    ("", "\n yes", "", "\n yes"),
    ("", "yes [opens]so[closes]", "", "yes [opens]so[closes]"),
    ("", "[opens]so[closes]yes[opens]no[closes]", "so", "yes[opens]no[closes]"),
    ("", "[opens]a [opens] b[closes]c", "a [opens] b", "c"),
    ("", "[opens]so", "so", ""),
    ("", "[opens]so\n\n", "so", ""),
    ("", "[closes]yes", "", "[closes]yes"),
    ("[opens]", "so[closes]yes", "so", "yes"),
    ("[opens]\n", "so\n[closes]\nyes", "so", "yes"),
    ("[opens]\n", "[opens]\nso[closes]yes", "so", "yes"),
    ("[opens]\n", "so", "so", ""),
    ("[opens]\n", "", "", ""),
    ("[opens]\n\n[closes]\n\n", "yes", "", "yes"),
    ("[opens]\n\n[closes]\n\n", "[opens]so[closes]yes", "so", "yes"),
    ("", "[opens]é\n\n吾輩 🦙[closes]  猫", "é\n\n吾輩 🦙", "猫"),
    ("", "[opens]a <b> {c} </[closes]d", "a <b> {c} </", "d"),
]


@each_case("style", STYLES)
@each_case("at", range(len(THOUGHT)))
def test_reasoning_is_the_text_between_the_marks_at_the_beginning(style: str, at: int) -> None:
    marks = STYLES[style]

    def own(text: str) -> str:
        return text.replace(OPENS, marks.opens).replace(CLOSES, marks.closes)

    prompt, text, reasoning, content = map(own, THOUGHT[at])
    answer, is_whole, reasoned = everywhere(text, reading("none", style), prompt=prompt)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert is_whole
    opened = prompt.rstrip().endswith(marks.opens)
    assert bool(reasoned) == (opened or text.lstrip().startswith(marks.opens))
    for begun, end in reasoned:
        assert begun == 0
        assert end == (text.find(marks.closes) + len(marks.closes) if marks.closes in text else end)


def test_a_call_may_follow_reasoning_and_marks_within_it_are_ignored() -> None:
    text = (
        '<think>\nI could <tool_call>{"name": "now"}</tool_call>.\n</think>\n\nWell:\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    answer, _, _ = everywhere(text, reading("hermes", "think"))
    assert answer.reasoning == 'I could <tool_call>{"name": "now"}</tool_call>.'
    assert answer.content == "Well:"
    assert [call.name for call in answer.calls] == ["now"]
    for dialect, said in (
        ("llama3_json", '{"name": "now", "parameters": {}}'),
        ("pythonic", "[now()]"),
        ("json", '[{"name": "now"}]'),
    ):
        answer, _, _ = everywhere(f"<think>a</think>\n\n{said}", reading(dialect, "think"))
        assert [call.name for call in answer.calls] == ["now"]
        assert answer.content == ""


A, F, C = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary")
NEXT = "<|end|><|start|>assistant"

# text, reasoning, content, calls
CHANNELS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{A}so{NEXT}{F}yes<|return|>", "so", "yes", []),
    (f"{A}so{NEXT}{F}yes", "so", "yes", []),
    (f"{A}so", "so", "", []),
    (f"{A}so<|end|>", "so", "", []),
    (f"{A}so{NEXT}", "so", "", []),
    (f"{A}so{NEXT}<|channel|>fi", "so", "", []),
    (f"{A}a{NEXT}{A}b{NEXT}{F}c", "a\nb", "c", []),
    (f"{F}yes", "", "yes", []),
    (f"{F}\nyes\n\n", "", "yes\n\n", []),
    (f"{A}so{NEXT}{C} to=functions.now <|constrain|>json<|message|>{{}}<|call|>", "so", "",
     [("now", "{}")]),
    (f"{A}so{NEXT} to=functions.now{C} json<|message|>{{}}<|call|>", "so", "", [("now", "{}")]),
    (f"{A}so{NEXT}{C}<|message|>First{NEXT}{C} to=functions.now<|message|>{{}}", "so", "First",
     [("now", "{}")]),
    (f"{C} to=functions.now<|message|>{{}}<|call|><|start|>assistant{C} to=functions.add<|message|>"
     '{"a":', "", "", [("now", "{}"), ("add", '{"a":')]),
    (f"{A}so{NEXT}{C} to=browser.search<|message|>{{}}<|call|>", "so", "{}", []),
    (f"{A}a <b> | <|x|>{NEXT}{F}<|y|>", "a <b> | <|x|>", "<|y|>", []),
    (f"{A}é🦙{NEXT}{F}吾", "é🦙", "吾", []),
    (f"{A}{NEXT}{F}", "", "", []),
    (f"<|start|>assistant{A}so{NEXT}{F}yes", "so", "yes", []),
    ("no channels at all", "", "no channels at all", []),
    (f"{F}One{NEXT}{F}Two", "", "One\nTwo", []),
    ("", "", "", []),
    (f"{A} so \n{NEXT}{F} yes ", "so", "yes ", []),
]  # fmt: skip


@each_case("at", range(len(CHANNELS)))
def test_channels_separate_reasoning_and_content(at: int) -> None:
    text, reasoning, content, calls = CHANNELS[at]
    answer, _, reasoned = everywhere(text, reading(HARMONY))
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert len(reasoned) == text.count("analysis")


def test_every_style_is_covered() -> None:
    assert set(REASONING_PARSERS) == {"auto", "none", HARMONY, *STYLES}
    assert len(THOUGHT) >= 20
    assert len(CHANNELS) >= 20


def test_a_disabled_parser_leaves_the_text_unchanged() -> None:
    text = " <think>a</think>\n <tool_call>b "
    answer = parse_answer(text, reading("none", "none"), TOOLS)
    assert (answer.reasoning, answer.content, answer.calls) == ("", text, [])
