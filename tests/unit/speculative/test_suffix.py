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


@both
@pytest.mark.parametrize(
    ("tail", "least", "aligned"),
    [
        ([], 4, True),  # from the start
        ([5], 4, True),  # all of the answer
        ([6], 0, False),
        ([9, 6, 7], 2, True),
        ([9, 6, 7], 3, False),
        ([8, 5, 9], 0, False),  # the end
    ],
)
def test_whether_a_tail_aligns_is_known_without_what_follows(
    kind: Kind, tail: list[int], least: int, *, aligned: bool
) -> None:
    text = ints(5, 6, 7, 8, 5, 9)
    assert kind(1).aligns(0, text, ints(*tail), least) == aligned
    assert not kind(1).aligns(0, ints(), ints(), 0)


NUM_ROWS, ROW_BEGIN = 400, (1, 2)


def rows(num: int = NUM_ROWS) -> list[int]:
    """Return a text of rows that begin with the same pair, and have a token of their own."""
    return [id_ for row in range(num) for id_ in (*ROW_BEGIN, 100 + row, 3, 4)]


def steps_through(
    index: SuffixIndex | PlainSuffixIndex, text: list[int], answer: list[int], begin: int = 0
) -> list[list[int]]:
    """Return what is proposed where the answer is generated token by token from `begin` on."""
    whole = ints(*text)
    return [
        index.follow(0, whole, ints(*answer[:length]), 3).tolist()
        for length in range(begin, len(answer))
    ]


@both
def test_a_row_that_begins_as_400_others_is_followed_where_the_answer_is(kind: Kind) -> None:
    text = rows()
    answer = text[:50]
    found = steps_through(kind(1), text, answer)
    assert found == [text[at : at + 3] for at in range(50)]


@both
def test_an_answer_that_is_followed_late_is_expected_as_far_from_the_start(kind: Kind) -> None:
    """As after a preemption: nothing is known of the steps before."""
    text, index = rows(), kind(1)
    steps_through(index, text, text[:22])
    index.forget(0)
    answer = text[:100]
    assert steps_through(index, text, answer, begin=82)[0] == text[82:85]


@both
def test_a_changed_token_leaves_the_place(kind: Kind) -> None:
    """Drafts that were rejected are no part of the answer: its length is what counts."""
    text = rows()
    answer = [*text[:32], 50, *text[33:60]]
    found = steps_through(kind(1), text, answer)
    assert found[:32] == [text[at : at + 3] for at in range(32)]
    assert found[35:] == [text[at : at + 3] for at in range(35, 60)]  # from the next pair on


@both
def test_a_longer_match_elsewhere_moves_the_place(kind: Kind) -> None:
    """Two rows are left out: the answer goes on at a row that is known by its own token."""
    text = rows(30)
    answer = [*text[:25], *text[35:80]]
    found = steps_through(kind(1), text, answer)
    # The place where it went on matches no longer once the row's own token is known.
    assert found[29:] == [text[at : at + 3] for at in range(39, 80)]


@both
def test_a_slot_that_is_used_again_knows_no_place(kind: Kind) -> None:
    text, index = rows(), kind(1)
    steps_through(index, text, text[:42])
    index.forget(0)
    other = [7, 8, *rows(3)]
    assert steps_through(index, other, other[:12]) == [other[at : at + 3] for at in range(12)]
    index.forget(0)
    fresh = kind(1)
    tail = ints(9, 9, 9, 9, 9, *text[:7])
    assert (
        index.follow(0, ints(*text), tail, 3).tolist()
        == fresh.follow(0, ints(*text), tail, 3).tolist()
    )


@both
def test_a_quotation_goes_on_where_it_went_on(kind: Kind) -> None:
    """Prompt lookup: an answer repeats the first of 100 rows of its prompt."""
    prompt = rows(100)
    answer, index = prompt[:60], kind(2)
    tokens = np.zeros((2, 1024), np.int32)
    text = [*prompt, 90, *answer]
    tokens[1, : len(text)] = text
    right = 0
    for length in range(len(prompt) + 5, len(text) - 3):  # from the first row's own token on
        ids, counts, matches = np.zeros((1, MAX_DRAFTS), np.int32), ints(0), ints(0)
        of_step = (np.array([1]), ints(length), ints(3), ids, counts, matches)
        assert index.finds_any(tokens, np.array([1]), ints(0, length), 4)
        index.propose(tokens, *of_step)
        right += ids[0, :3].tolist() == text[length : length + 3]
    assert right == len(answer) - 7


@given(
    text=st.lists(st.integers(0, 2), min_size=150, max_size=400),
    steps=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=30
    ),
    start=st.integers(0, 100),
)
def test_native_and_plain_keep_the_same_places(
    text: list[int], steps: list[tuple[int, int, bool]], start: int
) -> None:
    """Each pair occurs more than 32 times in most texts; the answer follows the text with changes,
    and questions between change nothing."""
    native, plain, at, answer = SuffixIndex(1), PlainSuffixIndex(1), start, list[int]()
    whole = ints(*text)
    for num, wrong, asks in steps:
        answer += [*text[at : at + num], wrong]
        at += num + wrong
        tail = ints(*answer)
        if asks:
            assert native.aligns(0, whole, tail, 4) == plain.aligns(0, whole, tail, 4)
        following = native.follow(0, whole, tail, 5).tolist()
        assert following == plain.follow(0, whole, tail, 5).tolist()
        assert following == native.follow(0, whole, tail, 5).tolist()


@given(
    text=st.lists(st.integers(0, 2), min_size=100, max_size=400),
    steps=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12),
)
def test_native_and_plain_keep_the_same_places_in_a_text(
    text: list[int], steps: list[tuple[int, bool]]
) -> None:
    native, plain, length = SuffixIndex(1), PlainSuffixIndex(1), 0
    tokens = ints(*text)[None]
    for num, asks in steps:
        length = min(length + num, len(text))
        found = []
        for index in (native, plain):
            kept: list[object] = []
            if asks:
                kept.append(index.finds_any(tokens, np.array([0]), ints(length), 4))
            ids, counts, matches = np.zeros((1, MAX_DRAFTS), np.int32), ints(0), ints(0)
            of_step = (np.array([0]), ints(length), ints(MAX_DRAFTS), ids, counts, matches)
            index.propose(tokens, *of_step)
            found.append((kept, ids.tolist(), counts.tolist(), matches.tolist()))
        assert found[0] == found[1]


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
