"""ReadAhead: blocks read before they are requested, and when they may be returned."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.transfer.read_ahead import BUFFERS, ReadAhead

NUM_BYTES = 64


class Disk:
    """Places with a number each, written into every byte; counts the reads of each place."""

    def __init__(self, num_places: int = 32) -> None:
        self.numbers = list(range(num_places))
        self.reads = [0] * num_places
        self.fails = False

    def read(self, place: int, pages: np.ndarray) -> bytes | None:
        self.reads[place] += 1
        if self.fails:
            raise OSError(errno.EIO, "the disk is gone")
        number = self.numbers[place]
        pages[:] = number % 256
        return None if number < 0 else bytes([number])


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def ahead(disk: Disk) -> Iterator[ReadAhead]:
    ahead = ReadAhead(disk.read, NUM_BYTES)
    yield ahead
    ahead.close()


def asked(ahead: ReadAhead, place: int) -> int | None:
    """Return the number at the place."""
    out = np.full(NUM_BYTES - 3, 255, np.uint8)
    digest = ahead.read(place, out)
    if digest is None:
        assert (out == 255).all(), "an incomplete block is never returned"
        return None
    assert (out == digest[0]).all()
    return digest[0]


def test_announced_blocks_are_read_once_and_others_on_request(disk: Disk, ahead: ReadAhead) -> None:
    ahead.expect([3, 4, 5])
    ahead.expect([20, 3])
    assert [asked(ahead, place) for place in (3, 4, 9, 5, 20)] == [3, 4, 9, 5, 20]
    assert [disk.reads[place] for place in (3, 4, 9, 5, 20)] == [1, 1, 1, 1, 1]


def test_no_more_is_read_than_there_are_buffers(disk: Disk, ahead: ReadAhead) -> None:
    ahead.expect(range(20))
    assert asked(ahead, 0) == 0  # the threads take places in order
    assert asked(ahead, 15) == 15  # not begun: read at once, and not again in its turn
    assert sum(disk.reads) <= BUFFERS + 2
    assert [asked(ahead, place) for place in range(1, 20)] == list(range(1, 20))
    assert disk.reads[:20] == [1] * 15 + [2] + [1] * 4


def test_an_incomplete_block_is_reported_as_missing(disk: Disk, ahead: ReadAhead) -> None:
    disk.numbers[1] = -1
    ahead.expect([1])
    assert asked(ahead, 1) is None
    assert asked(ahead, 1) is None


def test_a_failure_is_raised_to_the_caller_and_leaks_no_buffer(
    disk: Disk, ahead: ReadAhead
) -> None:
    disk.fails = True
    for _ in range(2 * BUFFERS):
        ahead.expect([1])
        with pytest.raises(OSError, match="the disk is gone"):
            asked(ahead, 1)
    disk.fails = False
    ahead.expect(range(10))
    assert [asked(ahead, place) for place in range(10)] == list(range(10))


@given(st.lists(st.tuples(st.sampled_from("eaacf"), st.lists(st.integers(0, 9), max_size=8))))
def test_a_request_returns_the_present_content(drawn: list[tuple[str, list[int]]]) -> None:
    disk = Disk(10)
    ahead = ReadAhead(disk.read, NUM_BYTES)
    for verb, places in drawn:
        if verb == "e":
            ahead.expect(places)
        elif verb == "a":
            assert [asked(ahead, place) for place in places] == [disk.numbers[at] for at in places]
        elif verb == "c":
            for place in places:
                ahead.forget(place)
                disk.numbers[place] = (disk.numbers[place] + 10) % 200
        else:
            ahead.forget()
    ahead.close()
