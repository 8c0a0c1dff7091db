"""Ghosts: what was evicted last is remembered, so much and no more."""

from __future__ import annotations

from quire.cache.ghosts import Ghosts

KEYS = [bytes([number]) * 16 for number in range(6)]


def test_the_digests_evicted_last_are_kept() -> None:
    ghosts = Ghosts(3)
    ghosts.add(KEYS[:2])
    ghosts.add(KEYS[2:5])
    assert len(ghosts) == 3
    assert [key in ghosts for key in KEYS] == [False, False, True, True, True, False]


def test_what_is_taken_is_told_once() -> None:
    ghosts = Ghosts(3)
    assert ghosts.take(KEYS[:2]).tolist() == [False, False]
    ghosts.add(KEYS[:2])
    assert ghosts.take([KEYS[1], KEYS[2]]).tolist() == [True, False]
    assert ghosts.take([KEYS[1], KEYS[0]]).tolist() == [False, True]


def test_more_at_once_than_the_limit_keeps_the_last() -> None:
    ghosts = Ghosts(2)
    ghosts.add(KEYS)
    assert [key in ghosts for key in KEYS] == [False] * 4 + [True] * 2
    ghosts.clear()
    assert len(ghosts) == 0


def test_what_was_taken_and_evicted_again_counts_from_then() -> None:
    ghosts = Ghosts(3)
    ghosts.add(KEYS[:3])
    ghosts.take(KEYS[:1])
    ghosts.add([KEYS[0]])  # now the youngest
    ghosts.add([KEYS[3]])
    assert [key in ghosts for key in KEYS] == [True, False, True, True, False, False]


def test_keys_that_come_and_go_for_ever_leave_nothing_behind() -> None:
    ghosts = Ghosts(3)
    ghosts.add(KEYS[4:])
    for _ in range(100):
        ghosts.add(KEYS[:1])
        assert ghosts.take(KEYS[:1]).all()
    assert len(ghosts._order) <= 2 * ghosts.limit + 1
    ghosts.add(KEYS[:2])
    assert [key in ghosts for key in KEYS] == [True, True, False, False, False, True]
