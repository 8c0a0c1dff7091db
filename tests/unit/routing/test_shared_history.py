"""SharedHistory against PrefixHistory, and names that are equal in all processes."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.routing.prefix_history import BLOCK_BYTES, PrefixHistory, block_names
from quire.routing.shared_history import SharedHistory, keyed_block_names

KEY = bytes(range(16))


def table(places: int, replicas: int) -> SharedHistory:
    return SharedHistory(memoryview(array("Q", bytes(8 * places * replicas))), replicas)


def test_while_nothing_is_evicted_it_finds_what_a_prefix_history_finds() -> None:
    rng = random.Random(5)
    shared, plain = table(1 << 12, 3), PrefixHistory(1 << 12)
    prompts = [[rng.getrandbits(63) | 1 for _ in range(rng.randint(1, 12))] for _ in range(40)]
    for _ in range(300):
        base, number = rng.choice(prompts), rng.randrange(3)
        names = [*base[: rng.randint(1, len(base))], rng.getrandbits(63) | 1]
        assert shared.matched_blocks(names, 0b111) == plain.matched_blocks(names, 0b111)
        if rng.random() < 0.6:
            shared.note(names, number)
            plain.note(names, number)
        elif rng.random() < 0.1:
            shared.forget(number)
            plain.forget(number)
    assert shared.matched_blocks([], 0b101) == {0: 0, 2: 0}


def test_the_least_recently_used_of_a_set_is_evicted() -> None:
    shared = table(8, 1)  # one set of eight places
    for name in range(1, 9):
        shared.note([name], 0)
    shared.note([1], 0)
    shared.note([9], 0)
    assert shared.matched_blocks([2], 1) == {0: 0}
    for name in (1, 3, 4, 5, 6, 7, 8, 9):
        assert shared.matched_blocks([name], 1) == {0: 1}


def test_names_stand_for_a_scope_and_all_text_before() -> None:
    prompt = bytes(range(256)) * 3 + b"rest"
    names = keyed_block_names(KEY, "tenant", prompt)
    assert len(names) == len(block_names("tenant", prompt)) == 3
    assert len(set(names)) == 3
    assert names[:2] == keyed_block_names(KEY, "tenant", prompt[: 2 * BLOCK_BYTES])
    assert names != keyed_block_names(KEY, "other", prompt)
    assert names != keyed_block_names(bytes(16), "tenant", prompt)
    # Fixed: another process, whatever it hashes text with, has the same.
    assert names[0] == 8742304512741358649
    assert keyed_block_names(KEY, "\ud800", prompt)  # a salt may be any text


def test_places_that_are_no_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="no sets"):
        table(12, 1)
