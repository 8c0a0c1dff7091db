"""The suffix index, native and plain: the same continuations of the same texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire._native import SuffixIndex, TokenHistory
from quire.speculative.plain_history import PlainTokenHistory
from quire.speculative.suffix import PlainSuffixIndex

Kind = type[SuffixIndex] | type[PlainSuffixIndex]
both = pytest.mark.parametrize("kind", [SuffixIndex, PlainSuffixIndex])
MAX_DRAFTS = 6


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def drafts_after(
    index: SuffixIndex | PlainSuffixIndex, text: list[int], limit: int = MAX_DRAFTS
) -> list[int]:
    """Return the drafts that follow `text` in slot 1."""
    ids, counts = np.zeros((1, MAX_DRAFTS), np.int32), ints(0)
    tokens = np.zeros((2, 64), np.int32)
    tokens[1, : len(text)] = text
    index.propose(tokens, np.array([1]), ints(len(text)), ints(limit), ids, counts, ints(0))
    return [int(id_) for id_ in ids[0, : counts[0]]]


@both
@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4]),  # goes on with itself
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5, 2, 3, 8, 1]),  # the longer match, not the later
        ([2, 3, 9, 2, 3, 8, 7, 2, 3], [8, 7, 2, 3, 8, 7]),  # the later of equal ones
        ([4, 4, 4], [4, 4, 4, 4, 4, 4]),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 1], []),  # one token is no match
        ([], []),
    ],
)
def test_drafts_follow_the_longest_match(kind: Kind, text: list[int], drafts: list[int]) -> None:
    assert drafts_after(kind(2), text) == drafts


@both
@pytest.mark.parametrize(
    ("text", "shared", "match"),
    [
        ([1, 2, 3, 4, 1, 2], [], 2),
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [], 3),
        ([1, 2, 3, 9, 5, 2, 3], [7, 9, 5, 2, 3, 8], 4),  # of another text
        (40 * [4], [], 32),
        ([1, 2, 3, 1], [], 0),
    ],
)
def test_the_length_of_the_match_is_known(
    kind: Kind, text: list[int], shared: list[int], match: int
) -> None:
    index = kind(2)
    if shared:
        others = (TokenHistory if kind is SuffixIndex else PlainTokenHistory)(64)
        others.add(ints(*shared))
        index.share(1, others)  # type: ignore[arg-type]
    tokens, slots, matches = np.zeros((2, 64), np.int32), np.array([1]), ints(-1)
    tokens[1, : len(text)] = text
    ids, length = np.zeros((1, MAX_DRAFTS), np.int32), ints(len(text))
    index.propose(tokens, slots, length, ints(MAX_DRAFTS), ids, ints(0), matches)
    assert matches.tolist() == [match]
    found = [
        index.finds_any(tokens, slots, ints(0, len(text)), least) for least in (3, 4, match + 1)
    ]
    assert found == [match >= 3, match >= 4, False]


@both
def test_a_forgotten_slot_begins_another_text(kind: Kind) -> None:
    index = kind(2)
    drafts_after(index, [1, 2, 3, 4, 5])
    index.forget(1)
    assert drafts_after(index, [7, 8, 1, 2]) == []
    assert drafts_after(index, [7, 8, 1, 2, 7, 8], limit=2) == [1, 2]


@both
@pytest.mark.parametrize(
    ("tail", "following"),
    [
        ([], [5, 6, 7]),  # nothing is generated yet
        ([5], [6, 7, 8]),
        ([6], []),
        ([9, 6, 7], [8, 5, 9]),
        ([8, 5, 9], []),  # the end
        ([9, 9], []),
    ],
)
def test_a_text_follows_the_tail_of_another(
    kind: Kind, tail: list[int], following: list[int]
) -> None:
    text = ints(5, 6, 7, 8, 5, 9)
    assert kind(1).follow(0, text, ints(*tail), 3).tolist() == following


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=64),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    tail=st.lists(st.integers(0, 3), max_size=6),
)
def test_native_and_plain_agree(text: list[int], steps: list[int], tail: list[int]) -> None:
    native, plain = SuffixIndex(2), PlainSuffixIndex(2)
    for length in np.minimum(np.cumsum(steps), len(text)).tolist():
        assert drafts_after(native, text[:length]) == drafts_after(plain, text[:length])
    whole, last = ints(*text), ints(*tail)
    following = native.follow(0, whole, last, 5).tolist()
    assert following == plain.follow(0, whole, last, 5).tolist()


@pytest.mark.parametrize(
    ("slot", "length", "limit"), [(2, 1, 1), (-1, 1, 1), (0, 65, 1), (0, -1, 1), (0, 1, 7)]
)
def test_what_does_not_fit_is_refused(slot: int, length: int, limit: int) -> None:
    ids, counts = np.zeros((1, MAX_DRAFTS), np.int32), ints(0)
    tokens = np.zeros((2, 64), np.int32)
    with pytest.raises(ValueError, match=r"out of range|longer than its row"):
        SuffixIndex(2).propose(
            tokens, np.array([slot]), ints(length), ints(limit), ids, counts, ints(0)
        )
