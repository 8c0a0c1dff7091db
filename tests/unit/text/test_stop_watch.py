"""StopWatch: its verdict on a next token is what the output stream finds once it is appended."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import Detokenizer
from quire.text.stop_watch import StopWatch
from quire.text.stops import StopStrings
from quire.text.tokenizer import Tokenizer
from tests.drawn import examples
from tests.unit.text.made_tokenizers import byte_level_json, made, metaspace_json

KINDS = {"byte-level": byte_level_json, "metaspace": metaspace_json}
STOPS = st.lists(st.sampled_from(["a", "th", " ", "e ", "é", "日", "\ufffd", "er t"]), min_size=1)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return made(KINDS[kind]())


def watch(kind: str, stops: list[str], armed_from: int = 0) -> StopWatch:
    return StopWatch(Detokenizer(tokenizer(kind)), StopStrings(stops), armed_from=armed_from)


def has_ended(kind: str, stops: list[str], ids: list[int], armed_from: int) -> bool:
    """Push all tokens into a new output stream; return whether it has ended."""
    reader, seen = Detokenizer(tokenizer(kind)), StopStrings(stops)
    for text, token in reader.spans(ids):
        seen.push(text, armed=token >= armed_from)
    return seen.matched is not None


@settings(max_examples=examples(150), deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    stops=STOPS,
    armed_from=st.integers(0, 3),
    draw=st.data(),
)
def test_a_token_ends_an_answer_where_the_stream_finds_a_stop_string(
    kind: str, stops: list[str], armed_from: int, draw: st.DataObject
) -> None:
    some = st.integers(0, tokenizer(kind).vocab_size - 1)
    ids = draw.draw(st.lists(some, max_size=12))
    asked = draw.draw(st.lists(some, min_size=1, max_size=4))
    watcher = watch(kind, stops, armed_from)
    taken: list[int] = []
    for token_id in ids:
        for other in asked:
            expected = has_ended(kind, stops, [*taken, other], armed_from)
            assert watcher.ends_with(other) == expected
        watcher.take([token_id])
        taken.append(token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_independent_even_within_a_character(kind: str) -> None:
    parts = tokenizer(kind).encode("日", add_special_tokens=False)
    others = tokenizer(kind).encode("é", add_special_tokens=False)
    one = watch(kind, ["日"])
    one.take(parts[:-1])
    other = one.copy()
    other.take(others)
    assert one.ends_with(parts[-1]) == has_ended(kind, ["日"], parts, 0)
    assert other.ends_with(parts[-1]) == has_ended(
        kind, ["日"], [*parts[:-1], *others, parts[-1]], 0
    )
