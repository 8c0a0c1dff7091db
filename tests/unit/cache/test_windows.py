"""Blocks behind the attention window are freed, and the metadata stays consistent."""

from __future__ import annotations

from random import Random

import numpy as np

from quire.cache.manager import CacheManager
from tests.unit.cache.test_manager import Books, ints, steps


def windowed(window: int, num_blocks: int = 12) -> Books:
    """Return a cache with blocks of 4 tokens."""
    books = Books(num_blocks=num_blocks)
    books.cache.window = window
    return books


def drop(books: Books, slot: int, computed: int) -> int:
    freed = books.cache.drop_behind(ints(slot), ints(computed), books.tokens)
    assert books.cache.check_integrity() == []
    return freed


def test_blocks_behind_the_window_are_freed_once_and_stay_findable() -> None:
    books = windowed(8)
    books.begin(0, list(range(30)))
    assert drop(books, 0, 15) == 1  # the last computed token sees 7 .. 14, and so does a fork of it
    assert drop(books, 0, 15) == 0
    assert drop(books, 0, 30) == 4
    assert books.cache.tables.firsts[0] == 5
    assert books.cache.tables.row(0).tolist() == books.cache.tables.blocks[0, 5:8].tolist()
    assert books.cache.num_freed_by(0) == 3
    assert books.begin(1, list(range(29))) == 7  # all of it is found, and shared where it is held
    assert books.end(0, 1) == 9  # and the last block of each is its own
    assert books.cache.num_free == 12


def test_without_a_window_nothing_is_freed() -> None:
    books = windowed(0)
    books.begin(0, list(range(30)))
    assert drop(books, 0, 30) == 0


def test_unregistered_blocks_are_registered_before_they_are_freed() -> None:
    books = windowed(4)
    cache = books.cache
    books.begin(0, list(range(5)))
    books.tokens[0, :30] = np.arange(30)
    cache.allocate(ints(0), ints(6))
    assert drop(books, 0, 30) == 6
    chain = cache.chain(np.arange(30, dtype=np.int32), "")
    assert chain is not None
    assert cache.match(chain).num_blocks == 7


def test_a_fork_has_only_what_its_next_token_sees() -> None:
    books = windowed(8)
    cache = books.cache
    books.begin(0, list(range(22)))
    drop(books, 0, 22)
    assert cache.can_fork(0, 22)
    assert not cache.can_fork(0, 18)  # its token 17 sees 10, which is gone
    copy_from, copy_to = cache.fork(0, 1, 22)
    assert (len(copy_from), len(copy_to)) == (1, 1)
    assert cache.tables.firsts[:2].tolist() == [3, 3]
    assert cache.entries(1).columns.tolist() == [3, 4, 5]
    assert cache.tables.blocks[1, 3:5].tolist() == cache.tables.blocks[0, 3:5].tolist()
    assert cache.check_integrity() == []
    books.end(0, 1)


def test_the_audit_passes_after_any_computing_forking_dropping_and_freeing() -> None:
    for seed in range(40):
        random = Random(seed)
        window = random.choice([1, 3, 4, 9])
        cache = CacheManager(40, 4, prefix_caching=random.random() < 0.7, window=window)
        cache.lay_out(num_slots=4, max_tokens=64)
        tokens = np.zeros((4, 64), np.int32)
        lengths = [0] * 4
        for _ in range(60):
            slot = random.randrange(4)
            others = [other for other in range(4) if other != slot and lengths[other]]
            if lengths[slot] and random.random() < 0.2:
                cache.free(ints(slot), steps(0))
                lengths[slot] = 0
            elif lengths[slot]:
                end = min(lengths[slot] + random.randrange(1, 9), 64)
                cache.extend(slot, end)
                tokens[slot, lengths[slot] : end] = random.randrange(3)
                lengths[slot] = end
                cache.drop_behind(ints(slot), ints(end), tokens)
            elif others and random.random() < 0.5:
                source = random.choice(others)
                if cache.can_fork(source, lengths[source]):
                    cache.fork(source, slot, lengths[source])
                    tokens[slot], lengths[slot] = tokens[source], lengths[source]
            else:
                token_ids = np.full(random.randrange(1, 20), random.randrange(3), np.int32)
                chain = cache.chain(token_ids, "")
                if chain is not None:
                    cache.attach(slot, cache.match(chain))
                cache.extend(slot, len(token_ids))
                tokens[slot, : len(token_ids)], lengths[slot] = token_ids, len(token_ids)
            assert cache.check_integrity() == []
            for one in range(4):
                held = -(-lengths[one] // 4) - max(lengths[one] - window, 0) // 4
                kept = int(cache.tables.counts[one] - cache.tables.firsts[one])
                assert kept >= held, "a visible block was freed"
        used = np.array([one for one in range(4) if lengths[one]], np.intp)
        cache.free(used, np.zeros(len(used), np.int64))
        assert cache.num_free == 40
