"""Random answers: written in a format and parsed back, or random fragments.

What is drawn nests, escapes, repeats and is truncated; the division never changes the result.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tests.cases import each_case
from tests.drawn import examples
from tests.unit.output_parsers.cuts import everywhere, reading, said_in
from tests.unit.output_parsers.writers import TOOLS, WRITERS

NUM_WRITTEN, NUM_RUBBISH = examples(25), examples(60)
_ALPHABET = "ab {}[]\":,\\\n\t'<>|/=()é吾🦙.0"
_PIECES = (
    *("<tool_call>", "</tool_call>", "<function=now>", "<parameter=text>", "</parameter>"),
    *("<arg_key>", "text</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>now"),
    *("</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "functools", "<|python_tag|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|python_start|>", "<|python_end|>", "now", "add"),
    *('{"name": "now", "arguments": {}}', '{"name": "', '"arguments": ', '{"a": [1, "x"]}'),
    *("<think>", "</think>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
    *("<|start|>assistant", " to=functions.now", "<|call|>", "now(text='a')", "[now(", ")]"),
    *("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>"),
    *("<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", "```json\n", "```"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.now:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\", '"', "{", "}", "[", "]", ",", ":", " ", "\n"),
)


def _text(draw: random.Random, most: int = 12) -> str:
    return "".join(draw.choice(_ALPHABET) for _ in range(draw.randrange(most)))


def _value(draw: random.Random, levels: int) -> Any:
    kind = draw.randrange(7 if levels else 5)
    if kind == 5:
        return [_value(draw, levels - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {_text(draw): _value(draw, levels - 1) for _ in range(draw.randrange(4))}
    return (_text(draw), draw.randint(-(10**9), 10**9), draw.random() - 0.5, None, True)[kind]


def _call(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw arguments of the types their names imply, for formats with unquoted values."""
    drawn: dict[str, Any] = {
        "text": _text(draw, 30),
        "days": draw.randint(-5, 5),
        "tags": [_value(draw, 3) for _ in range(draw.randrange(4))],
        "where": {_text(draw): _value(draw, 3) for _ in range(draw.randrange(4))},
        "exact": draw.random() < 0.5,
    }
    kept = draw.sample(sorted(drawn), draw.randrange(len(drawn) + 1))
    return draw.choice(["look_up", "add", "weather"]), {key: drawn[key] for key in kept}


@each_case("form", WRITERS)
def test_random_calls_are_parsed_back(form: str) -> None:
    dialect, write = WRITERS[form]
    draw = random.Random(form)
    for _ in range(NUM_WRITTEN):
        calls = [_call(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
        text = write("", calls)
        (answer, is_whole, _), short = everywhere(text, reading(dialect), most=40), text
        assert is_whole
        assert answer.content == ""
        read = [(call.name, json.loads(call.arguments)) for call in answer.calls]
        assert read == calls
        short = text[: draw.randrange(len(text))]
        cut, _, _ = everywhere(short, reading(dialect), most=10)
        assert [call.name for call in cut.calls] == [name for name, _ in calls][: len(cut.calls)]


@each_case("dialect", sorted({dialect for dialect, _ in WRITERS.values()}))
@each_case("reasoning", ["none", "think"])
def test_random_text_is_parsed_the_same_for_any_division(dialect: str, reasoning: str) -> None:
    draw = random.Random(f"{dialect} {reasoning}")
    how = reading(dialect, reasoning)
    for _ in range(NUM_RUBBISH):
        text = "".join(draw.choice(_PIECES) for _ in range(draw.randint(1, 14)))
        _, _, reasoned = everywhere(text, how, most=25)
        assert all(0 <= begun <= end <= len(text) for begun, end in reasoned)


def test_text_arriving_byte_by_byte_is_parsed_the_same() -> None:
    """A detokenizer emits whole characters; here they are divided into bytes."""
    for dialect, write in WRITERS.values():
        text = write("", [("look_up", {"text": "né 吾輩 🦙", "tags": ["é", {"🦙": 1}]})])
        pieces, decoded = [], b""
        for byte in text.encode():
            decoded += bytes([byte])
            try:
                pieces.append(decoded.decode())
                decoded = b""
            except UnicodeDecodeError:
                pieces.append("")
        whole = said_in([text], reading(dialect), TOOLS)
        assert said_in(pieces, reading(dialect), TOOLS) == whole
