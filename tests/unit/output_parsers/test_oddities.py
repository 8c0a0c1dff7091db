"""Answers that deviate from their format: hand-written, one line each, divided everywhere."""

from __future__ import annotations

import pytest

from quire.output_parsers.answer_parser import AnswerParser
from tests.cases import each_case
from tests.unit.output_parsers.cuts import everywhere, reading, said_in
from tests.unit.output_parsers.writers import TOOLS

BAR = "\uff5c"
SECTION, SECTION_ENDS = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
CALL, SEP, CALL_ENDS = (
    f"<{BAR}tool▁call▁begin{BAR}>",
    f"<{BAR}tool▁sep{BAR}>",
    f"<{BAR}tool▁call▁end{BAR}>",
)
NOW = [("now", "{}")]

# format, text, content, calls (name and the text of the arguments), whether the last is complete
ODD: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    # Hermes: keys in another order, beside others, arguments as text, none at all
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "",
     [("now", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"id": 7, "x": [1, {"name": "no"}], "name": "now"}</tool_call>', "",
     NOW, True),
    ("hermes", r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\u00e9\"}"}</tool_call>',
     "", [("now", '{"a": "é"}')], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", NOW, True),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", NOW, True),
    ("hermes", '<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>', "",
     [("now", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}'
     "</tool_call>", "", NOW, True),
    # Hermes: missing, doubled, and embedded marks
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", NOW, True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "add", "arguments": '
     '{"a":1}}</tool_call>', "", [*NOW, ("add", '{"a":1}')], True),
    ("hermes", '<tool_call>\n{"name": "now"}\n{"name": "add"}\n</tool_call>', "",
     [*NOW, ("add", "{}")], True),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "add"}]</tool_call>', "",
     [*NOW, ("add", "{}")], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
     [("add", '{"a": "</tool_call>"}')], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}}}}</tool_call>', "",
     [("now", '{"a": 1}')], True),
    ("hermes", '<tool_call>```json\n{"name": "now"}\n```</tool_call>', "", NOW, True),
    ("hermes", "a <tool_call> b", "a <tool_call> b", [], True),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", [], True),
    ("hermes", '<tool_call>{"a": 1}</tool_call> c', '<tool_call>{"a": 1}</tool_call> c', [], True),
    ("hermes", "<<tool_call<tool_call >", "<<tool_call<tool_call >", [], True),
    ("hermes", 'A\n<tool_call>{"name": "now"}</tool_call>\nB', "A\nB", NOW, True),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n\n', "", NOW, True),
    # Hermes: invalid JSON
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "",
     [("add", '{"a": 1')], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "",
     [("add", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>', "",
     [("add", "{a: 1}")], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "",
     [("add", '{"a": "x')], False),
    ("hermes", '<tool_call>{"name": "add", "argum', "", [("add", "")], False),
    ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', [], True),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 7, "arguments": {}}</tool_call>', [], True),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "null")],
     True),
    ("hermes", r'<tool_call>{"name": "\ud83d\ude80\ud83dx\u12", "arguments": {}}</tool_call>',
     "", [("🚀\ufffdx\ufffd", "{}")], True),
    # Qwen3-Coder: missing block marks; values of other types; values that contain marks
    ("qwen3_coder", "<function=now>\n</function>", "", NOW, True),
    ("qwen3_coder", "Well <function=now></function></tool_call> yes", "Well yes", NOW, True),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=days>\nfive\n</parameter>\n</function>"
     "</tool_call>", "", [("add", '{"days": "five"}')], True),
    ("qwen3_coder", "<tool_call><function=add><parameter=days>7</parameter><parameter=exact>True"
     "</parameter></function></tool_call>", "", [("add", '{"days": 7, "exact": true}')], True),
    ("qwen3_coder", "<function=add><parameter=nothing>null</parameter><parameter=nothing>no"
     "</parameter></function>", "", [("add", '{"nothing": null, "nothing": "no"}')], True),
    ("qwen3_coder", "<function=add><parameter=tags>[1, {}]</parameter><parameter=where>[1]"
     "</parameter></function>", "", [("add", '{"tags": [1, {}], "where": "[1]"}')], True),
    ("qwen3_coder", "<function=add><parameter=text>\n\n a\n<b>\n\n</parameter></function>", "",
     [("add", '{"text": "\\n a\\n<b>\\n"}')], True),
    ("qwen3_coder", "<function=add><parameter=else>5</parameter></function>", "",
     [("add", '{"else": "5"}')], True),
    ("qwen3_coder", "<function=add>\n<parameter=text>\nabc", "", [("add", '{"text": "abc')], False),
    ("qwen3_coder", "<function=add>\n<parameter=days>\n12", "", [("add", '{"days": 12')], False),
    ("qwen3_coder", "<function=add>\n<parameter=da", "", [("add", "")], False),
    ("qwen3_coder", "<tool_call>\n<function=ad", "<tool_call>\n<function=ad", [], True),
    ("qwen3_coder", "<tool_call>none</tool_call>!", "<tool_call>none</tool_call>!", [], True),
    ("qwen3_coder", "<tool_call><function=now></function><function=now></function></tool_call>", "",
     NOW * 2, True),
    # GLM: missing ends, marks that begin nothing, white space that belongs to the value
    ("glm", "<tool_call>now</tool_call>", "", NOW, True),
    ("glm", "<tool_call>now\n<tool_call>now\n</tool_call> Well.", "Well.", NOW * 2, True),
    ("glm", "A <tool_call> is it: <tool_call>now</tool_call>", "A <tool_call> is it:", NOW, True),
    ("glm", "<tool_call>add<arg_key>days</arg_key><arg_value>7</arg_value><tool_call>now"
     "</tool_call>", "", [("add", '{"days": 7}'), *NOW], True),
    ("glm", "<tool_call>add<arg_key>text</arg_key><arg_value>\n a\n</arg_value></tool_call>", "",
     [("add", '{"text": "\\n a\\n"}')], True),
    ("glm", "<tool_call>add<arg_key>days</arg_key><arg_key>text</arg_key><arg_value>x</arg_value>"
     "</tool_call>", "", [("add", '{"text": "x"}')], True),
    ("glm", "<tool_call>add<arg_key>days</arg_key><arg_value>five</arg_value></tool_call>", "",
     [("add", '{"days": "five"}')], True),
    ("glm", "<tool_call>add<arg_key>text</arg_key><arg_value>ab</tool_call>", "",
     [("add", '{"text": "ab</tool_call>')], False),
    ("glm", "<tool_call>add\n<arg_key>da", "", [("add", "")], False),
    ("glm", "<tool_call>ad", "<tool_call>ad", [], True),
    ("glm", "<tool_call>no name</tool_call>!", "<tool_call>no name</tool_call>!", [], True),
    # Llama 3: a mark, lists, unknown functions, text after and before
    ("llama3_json", ' {"name": "now", "parameters": {}}', "", NOW, True),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", NOW, True),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {"a": 1}}', "",
     [("now", '{"a": 1}')], True),
    ("llama3_json", '{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', [], True),
    ("llama3_json", '{"age": 7, "name": "now"}', '{"age": 7, "name": "now"}', [], True),
    ("llama3_json", '{"name": "now", "parameters": {}} and more', "and more", NOW, True),
    ("llama3_json", 'So: {"name": "now"}', 'So: {"name": "now"}', [], True),
    ("llama3_json", '{"name": "now", "parameters": {"a": ', "", [("now", '{"a": ')], False),
    ("llama3_json", '{"name": "no', '{"name": "no', [], True),
    ("llama3_json", "{", "{", [], True),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", [], True),
    ("llama3_json", '{"name": "now"};{"name": "Bob"}', ';{"name": "Bob"}', NOW, True),
    ("json", '```json\n{"name": "now", "arguments": {}}\n```', "", NOW, True),
    ("json", '```\n[{"name": "now"}]\n```\nDone.', "Done.", NOW, True),
    ("json", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', [], True),
    ("json", "`code` here", "`code` here", [], True),
    ("json", "[1, 2]", "[1, 2]", [], True),
    ("json", '[{"name": "now"}, {"name": "add", "arguments": {}}]', "",
     [*NOW, ("add", "{}")], True),
    ("json", "\n\n  hi", "\n\n  hi", [], True),
    # Python: quotes of all kinds, literals, positional arguments, invalid lists
    ("pythonic", "[now()]", "", NOW, True),
    ("pythonic", "now()", "", NOW, True),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", NOW, True),
    ("pythonic", "[weather('Oslo')]", "", [("weather", '{"city": "Oslo"}')], True),
    ("pythonic", "[add(city='a', 3)]", "", [("add", '{"city": "a", "text": 3}')], True),
    ("pythonic", '[look_up(text="""a "b"\nc""")]', "", [("look_up", '{"text": "a \\"b\\"\\nc"}')],
     True),
    ("pythonic", "[look_up(text='', note=\"\")]", "",
     [("look_up", '{"text": "", "note": ""}')], True),
    ("pythonic", r"[look_up(text='\x41\u00e9\'\n\\\d')]", "",
     [("look_up", r'{"text": "Aé' + "'" + r'\n\\\\d"}')], True),
    ("pythonic", "[look_up(where={'a': (1, None), 2: {}})]", "",
     [("look_up", '{"where": {"a": [1, null], "2": {}}}')], True),
    ("pythonic", "[add(number=+1_000, days=-2e3, any=0x1f)]", "",
     [("add", '{"number": 1000, "days": -2e3, "any": "0x1f"}')], True),
    ("pythonic", "[now(), other()]", ", other()]", NOW, True),
    ("pythonic", "[1, 2]", "[1, 2]", [], True),
    ("pythonic", "nowhere", "nowhere", [], True),
    ("pythonic", "[now] is a list", "[now] is a list", [], True),
    ("pythonic", "[look_up(text='ab", "", [("look_up", '{"text": "ab')], False),
    ("pythonic", "[look_up(tags=[1, ", "", [("look_up", '{"tags": [1')], False),
    ("pythonic", "[add(x=)]", ")]", [("add", '{"x": ')], True),
    # Mistral: both forms, an id, invalid forms
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "", NOW, True),
    ("mistral", "[TOOL_CALLS]now{}", "", NOW, True),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}] ok', "ok", NOW, True),
    ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', "", NOW, True),
    ("mistral", "[TOOL_CALLS]now[ARGS]{\"a\": 1", "", [("now", '{"a": 1')], False),
    ("mistral", "[TOOL_CALLS]now", "[TOOL_CALLS]now", [], True),
    ("mistral", "[TOOL_CALLS]a[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]a", NOW, True),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", [], True),
    ("mistral", "[TOOL] [TOOL_CALLS", "[TOOL] [TOOL_CALLS", [], True),
    # DeepSeek and Kimi: sections without ends, calls without sections or names
    ("deepseek", f"{CALL}now{SEP}{{}}{CALL_ENDS}", "", NOW, True),
    ("deepseek", f"a{SECTION}{CALL}now{SEP}{{}}", "a", NOW, True),
    ("deepseek", f"{SECTION}{CALL}now{SEP}{{}}{CALL_ENDS}{SECTION_ENDS}b", "b", NOW, True),
    ("deepseek", f"{SECTION}{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_ENDS}", "", NOW, True),
    ("deepseek", f"{SECTION}{CALL}now{SEP}{{\"a\": 1{CALL_ENDS}{SECTION_ENDS}", "",
     [("now", '{"a": 1')], True),
    ("deepseek", f"{SECTION}{CALL}{CALL_ENDS}", f"{CALL}{CALL_ENDS}", [], True),
    ("deepseek", f"{SECTION}{CALL}now{SEP}{{\"a", "", [("now", '{"a')], False),
    ("kimi", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "",
     NOW, True),
    ("kimi", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "", NOW, True),
    # Granite and Phi
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", NOW, True),
    ("granite", '<|tool_call|>{"name": "now"}<|/tool_call|>', "", NOW, True),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", [], True),
    ("phi", "functools[]", "functools[]", [], True),
    ("phi", 'I use functools[{"name": "now"}] so', "I use so", NOW, True),
    ("phi", "functools are useful", "functools are useful", [], True),
    ("phi", 'functools[{"name": "now", "arguments": {"a": [', "", [("now", '{"a": [')], False),
    # Harmony: recipients in both places, no header, channels in turn
    ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", NOW, True),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>{", "", [("now", "{")], False),
    ("harmony", "Hello there.", "Hello there.", [], True),
    ("harmony", "Hello.<|end|>", "Hello.", [], True),
    ("harmony", "<|channel|>final<|message|>One<|end|><|start|>assistant<|channel|>final<|message|>"
     "Two<|return|>", "One\nTwo", [], True),
    ("harmony", "<|message|>bare", "bare", [], True),
    ("harmony", "<|channel|>fin", "", [], True),
]  # fmt: skip


@each_case("at", range(len(ODD)))
def test_an_odd_answer_is_parsed_as_far_as_possible(at: int) -> None:
    dialect, text, content, calls, is_whole = ODD[at]
    answer, whole, _ = everywhere(text, reading(dialect))
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert answer.content == content
    assert whole == is_whole


def test_content_that_is_no_call_is_not_held_back() -> None:
    parser = AnswerParser(reading("hermes"), TOOLS, "")
    assert [piece.text for piece in parser.push("a <b")] == ["a <b"]
    assert parser.push(" <tool_") == []
    assert [piece.text for piece in parser.push("box>")] == [" <tool_box>"]
    parser = AnswerParser(reading("json"), TOOLS, "")
    assert [piece.text for piece in parser.push('{"answer": 4')] == ['{"answer": 4']


def test_without_tools_nothing_is_a_call() -> None:
    for dialect, text, _, _, _ in ODD:
        answer, is_whole, _ = everywhere(text, reading(dialect), tools=None, most=4)
        assert answer.calls == []
        assert is_whole
        assert dialect == "harmony" or answer.content == text


@pytest.mark.parametrize(
    ("dialect", "opening", "nested"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": ', '{"a": ['),
        ("hermes", "<tool_call>", '{"function": '),
        ("pythonic", "[now(a=", "["),
        ("pythonic", "[now(a=", "{1:"),
        ("json", "", '{"function": '),
    ],
)
def test_nesting_depth_is_bounded(dialect: str, opening: str, nested: str) -> None:
    text = opening + nested * 3000
    whole = said_in([text], reading(dialect))
    middle = len(text) // 2
    assert said_in([text[:middle], text[middle:]], reading(dialect)) == whole
