"""Merges recovered from token priorities merge in that order."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from quire.text.merges import merges_of
from tests.drawn import examples
from tests.unit.text.made_files import merged


def _as_the_rule_says(text: str, rank: dict[str, int]) -> list[int]:
    """Apply tiktoken's and SentencePiece's rule directly: best neighbours, leftmost first."""
    parts = list(text)
    while True:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        known = [(rank[pair], at) for at, pair in enumerate(joined) if pair in rank]
        if not known:
            return [rank[part] for part in parts]
        at = min(known)[1]
        parts[at : at + 2] = [joined[at]]


_WORDS = st.lists(st.text("ab", min_size=1, max_size=24), min_size=1, max_size=12)
_REPEATED = st.builds(
    lambda part, times, more: part * times + more,
    st.text("abc", min_size=1, max_size=4),
    st.integers(1, 9),
    st.text("abc", max_size=4),
)


@given(words=_WORDS, size=st.integers(3, 40), text=st.text("abc", max_size=30) | _REPEATED)
@settings(max_examples=examples(400), deadline=None)
def test_a_trained_vocabulary_merges_any_text_by_the_rule(
    words: list[str], size: int, text: str
) -> None:
    rank = {token: place for place, token in enumerate(merged([*words, "c" * 9], "abc", size))}
    assert Tokenizer(models.BPE(rank, merges_of(rank, rank))).encode(text).ids == (
        _as_the_rule_says(text, rank)
    )


@given(
    more=st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=16),
    text=st.text("ab", max_size=24) | _REPEATED.map(lambda text: text.replace("c", "a")),
)
@settings(max_examples=examples(400), deadline=None)
def test_a_vocabulary_in_random_order_does_too(more: list[str], text: str) -> None:
    rank = {token: place for place, token in enumerate(["a", "b", *more])}
    assert Tokenizer(models.BPE(rank, merges_of(rank, rank))).encode(text).ids == (
        _as_the_rule_says(text, rank)
    )


def test_each_division_of_a_token_is_a_merge_and_tokens_keep_their_order() -> None:
    place = {token: at for at, token in enumerate(["a", "b", "ba", "ab", "aba"])}
    assert merges_of(place, place) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]
