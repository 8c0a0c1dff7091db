"""Large texts with escapes: the document is the parser's own, and long strings are read in
pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base import json_strings
from quire.base.json_strings import MAX_ESCAPES, SLICE_BYTES, overlapping, slices
from quire.base.strict_json import parse_object
from tests.drawn import examples

LIMIT = 64 << 20
_TEXTS = st.text(st.sampled_from('ab"\\\n/é中😀\ud83d\ude00\x00'), max_size=30)
_VALUES = st.recursive(
    _TEXTS | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_strings, "MAX_ESCAPES", 0)
    monkeypatch.setattr(json_strings, "_PIECE_BYTES", 7)
    monkeypatch.setattr(json_strings, "SLICE_BYTES", 5)


def read(raw: bytes, *, yields: bool = True) -> Any:
    """The document, or None if the text is rejected."""
    try:
        return parse_object(raw, limit_bytes=LIMIT, yields=yields)
    except ValueError:
        return None


@settings(max_examples=examples(400), deadline=None)
@given(value=_VALUES, is_ascii=st.booleans(), pieces=st.integers(7, 20))
def test_the_document_is_the_one_of_the_parser(value: Any, is_ascii: bool, pieces: int) -> None:
    raw = json.dumps({"a": value, "\n": "\\"}, ensure_ascii=is_ascii).encode(errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_strings, "MAX_ESCAPES", 0)
        patch.setattr(json_strings, "_PIECE_BYTES", pieces)
        patch.setattr(json_strings, "SLICE_BYTES", pieces - 2)
        # Without escapes, keys may have become alike: "?" stands for each lone surrogate.
        assert read(raw) == (json.loads(raw) if is_ascii else read(raw, yields=False))


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=examples(400), deadline=None)
@given(raw=st.text(st.sampled_from('{}":,\\nu0d83 a\né'), max_size=40))
def test_what_the_parser_rejects_is_rejected(raw: str) -> None:
    text = ('{"a": "' + raw).encode()
    try:
        expected = parse_object(text, limit_bytes=LIMIT)
    except ValueError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_strings, "MAX_ESCAPES", 0)
        patch.setattr(json_strings, "_PIECE_BYTES", 7)
        assert read(text) == expected


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (rb'{"a\n": 1, "a\u000a": 2}', r'key "a\\n" is given twice'),
        (rb'{"a": 1, "\u0061": 2}', 'key "a" is given twice'),
        (rb'{"a": "\n\x"}', r"Invalid \\escape"),
        (rb'{"a": "\n', "the string that begins at byte 6 does not end"),
        (b'{"a": "\\n\n"}', "Invalid control character"),
        (b'{"a": "\\n\xff"}', "not UTF-8"),
        (rb'{"a": "\n" 1}', "it is not JSON: Expecting ',' delimiter"),
    ],
)
def test_errors_name_what_is_wrong(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_object(raw, limit_bytes=LIMIT, yields=True)


@pytest.mark.parametrize("unit", [rb"\n", rb"a\n", rb"\u4e2d", rb"\ud83d\ude00", rb"\\", rb"\""])
def test_no_long_string_with_escapes_reaches_the_parser(
    unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b'{"a": ["' + unit * (2 * MAX_ESCAPES) + b'"]}'
    read_at_once: list[int] = []
    loads = json.loads

    def counted(text: bytes) -> Any:
        read_at_once.append(len(text))
        return loads(text)

    monkeypatch.setattr("quire.base.json_strings.json.loads", counted)
    strings = json_strings.Unescaped(raw)
    assert b"\\" not in strings.text
    assert max(read_at_once) <= 16 * 1024 + 2
    assert sum(read_at_once) >= len(raw) - 10
    assert read(raw) == loads(raw)


@given(raw=st.binary(max_size=40).map(lambda raw: raw.replace(b"a", b"\\")))
def test_slices_hold_the_whole_text(raw: bytes) -> None:
    assert b"".join(slices(raw)) == raw
    assert b"".join(piece[:SLICE_BYTES] for piece in overlapping(raw)) == raw
