"""Ghosts, native and plain: the digests evicted last are remembered, up to the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire._native import Ghosts
from quire.cache.chain import digests_of
from quire.cache.ghosts import PlainGhosts

Kind = type[Ghosts] | type[PlainGhosts]
both = pytest.mark.parametrize("kind", [Ghosts, PlainGhosts])

KEYS = digests_of([bytes([number]) * 16 for number in range(6)])


@both
def test_the_last_evicted_digests_are_kept(kind: Kind) -> None:
    ghosts = kind(3)
    ghosts.add(KEYS[:2])
    ghosts.add(KEYS[2:5])
    assert len(ghosts) == 3
    assert [key in ghosts for key in KEYS] == [False, False, True, True, True, False]


@both
def test_what_is_taken_is_reported_once(kind: Kind) -> None:
    ghosts = kind(3)
    assert ghosts.take(KEYS[:2]).tolist() == [False, False]
    ghosts.add(KEYS[:2])
    assert ghosts.take(KEYS[[1, 2]]).tolist() == [True, False]
    assert ghosts.take(KEYS[[1, 0]]).tolist() == [False, True]


@both
def test_more_at_once_than_the_limit_keeps_the_last(kind: Kind) -> None:
    ghosts = kind(2)
    ghosts.add(KEYS)
    assert [key in ghosts for key in KEYS] == [False] * 4 + [True] * 2
    ghosts.clear()
    assert len(ghosts) == 0


@both
def test_evictions_in_small_parts_are_kept_as_if_at_once(kind: Kind) -> None:
    ghosts = kind(3)
    for place in range(6):
        ghosts.add(KEYS[place : place + 1])
    assert ghosts.take(KEYS).tolist() == [False] * 3 + [True] * 3
    ghosts.add(KEYS)
    ghosts.clear()
    assert len(ghosts) == 0


@both
def test_a_digest_evicted_again_counts_from_then(kind: Kind) -> None:
    ghosts = kind(3)
    ghosts.add(KEYS[:3])
    ghosts.take(KEYS[:1])
    ghosts.add(KEYS[:1])  # now the youngest
    ghosts.add(KEYS[3:4])
    assert [key in ghosts for key in KEYS] == [True, False, True, True, False, False]


@both
def test_keys_that_come_and_go_evict_no_other(kind: Kind) -> None:
    ghosts = kind(3)
    ghosts.add(KEYS[4:])
    for _ in range(100):
        ghosts.add(KEYS[:1])
        assert ghosts.take(KEYS[:1]).all()
    ghosts.add(KEYS[:2])
    assert [key in ghosts for key in KEYS] == [True, True, False, False, False, True]


@both
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 25), unique=True, max_size=12))),
)
def test_ghosts_match_a_bounded_list(
    kind: Kind, limit: int, drawn: list[tuple[bool, list[int]]]
) -> None:
    digests = np.arange(1, 53, dtype=np.uint64).reshape(26, 2)
    ghosts, model = kind(limit), list[int]()
    for is_taken, names in drawn:
        if is_taken:
            assert ghosts.take(digests[names]).tolist() == [name in model for name in names]
            model = [name for name in model if name not in names]
        else:
            names = [name for name in names if name not in model]
            ghosts.add(digests[names])
            model = (model + names)[-limit:]
        assert len(ghosts) == len(model)
        assert [name for name in range(26) if digests[name] in ghosts] == sorted(model)
