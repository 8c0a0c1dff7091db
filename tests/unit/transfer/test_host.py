"""HostStore: places in host memory, found by the digest they were saved under."""

from __future__ import annotations

import numpy as np

from quire.transfer.host import PIECE_BYTES, HostStore, piece_sizes
from tests.cases import each_case

SIZE = 24


def store_of(*places: int) -> HostStore:
    """Return a store with pieces of so many places, and some bytes beyond."""
    return HostStore([np.zeros(count * SIZE + 5, np.uint8) for count in places], SIZE)


def test_every_place_has_its_own_memory() -> None:
    store = store_of(3, 0, 1, 4)
    assert store.num_blocks == 8
    for place in range(8):
        store.room(place)[:] = place
    assert [store.room(place).tolist() for place in range(8)] == [[at] * SIZE for at in range(8)]


def test_a_block_is_found_by_its_digest_only() -> None:
    store = store_of(4)
    store.room(2)[:] = 7
    store.save(2, b"one", store.room(2))
    assert store.held() == ()
    assert store.fetch(2, b"one", store.room(2))
    assert not store.fetch(2, b"two", store.room(2))
    assert not store.fetch(1, b"one", store.room(1))
    store.save(2, b"two", store.room(2))
    assert not store.fetch(2, b"one", store.room(2))
    store.clear()
    assert not store.fetch(2, b"two", store.room(2))
    store.close()


@each_case("block_bytes", [1, 4096, 3 << 20, PIECE_BYTES, PIECE_BYTES + 1])
@each_case(
    "max_bytes", [0, 1, 4095, 100 << 20, PIECE_BYTES, (PIECE_BYTES * 7) // 2, 3 * PIECE_BYTES + 9]
)
def test_pieces_are_powers_of_two_within_the_given_memory(max_bytes: int, block_bytes: int) -> None:
    sizes = piece_sizes(max_bytes, block_bytes)
    assert sum(sizes) <= max_bytes
    assert all(size & (size - 1) == 0 and size >= block_bytes for size in sizes)
    left = max_bytes - sum(sizes)
    assert left < 2 * block_bytes  # the rest would not hold another
