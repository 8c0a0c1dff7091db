"""Strict JSON: accepted documents, and a specific message for each rejection."""

from __future__ import annotations

import pytest

from quire.base.strict_json import MAX_DEPTH, parse_object
from tests.cases import each_case


def nested(depth: int) -> bytes:
    """Return an object `depth` levels deep."""
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_an_object_is_parsed() -> None:
    raw = '{"a": [1, -2.5, true, null, "猫"], "b": {}}'.encode()
    assert parse_object(raw, limit_bytes=len(raw)) == {"a": [1, -2.5, True, None, "猫"], "b": {}}


@each_case(
    ("raw", "words"),
    [
        (b'{"a": 1, "a": 2}', '"a" is given twice'),
        (b'{"a": NaN}', "NaN, which is not JSON"),
        (b'{"a": -Infinity}', "-Infinity, which is not JSON"),
        (b'{"a": ' + b"1" * 41 + b"}", "number of 41 digits"),
        (b"[]", "it is []; an object"),
        (b"\xff", "not UTF-8 \\(byte 0\\)"),
        (b"{} x", 'more follows the first value at line 1 column 4, where it has "x"'),
        (b'{"a": 1,', "it ends before its value is complete \\(line 1 column 9\\)"),
        (b'{"a": 1,}', 'column 9, where it has "}"; leave the last comma out'),
        (b"{'a': 1}", "where it has \"'a': 1}\"; texts stand in double quotes"),
        (b'{"a": True}', 'where it has "True}"; JSON has true, false and null'),
        (b"prompt=hi", "it is a form, and forms are not read"),
        (b'{"a": "x\ny"}', r"write it as \\n, \\r or \\t"),
        (b" " * 101, "101 bytes; at most 100"),
    ],
)
def test_rejections_state_the_reason(raw: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", "\\[")):
        parse_object(raw, limit_bytes=100)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 900, 100_000])
def test_depth_is_limited(depth: int) -> None:
    parse_object(nested(MAX_DEPTH), limit_bytes=1 << 20)
    with pytest.raises(ValueError, match="more than 64 levels"):
        parse_object(nested(depth), limit_bytes=1 << 20)


def test_brackets_within_texts_are_no_levels() -> None:
    raw = b'{"a": "' + b"[{" * MAX_DEPTH + b'"}'
    assert parse_object(raw, limit_bytes=1 << 10) == {"a": "[{" * MAX_DEPTH}
