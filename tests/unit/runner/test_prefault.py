"""Prefault: which blocks are touched before use, and when that ends."""

import pytest

from quire.runner.prefault import PIECE_BYTES, Prefault

LAYERS = 3
BLOCK_BYTES = PIECE_BYTES * LAYERS // 4  # four blocks are a piece


class Touched:
    """An executor that counts how often each block of each layer was touched."""

    def __init__(self, num_blocks: int) -> None:
        self.times = [[0] * num_blocks for _ in range(LAYERS)]

    def touch_blocks(self, layer: int, first: int, last: int) -> None:
        assert first < last
        for block in range(first, last):
            self.times[layer][block] += 1


def _ahead(executor: Touched, *, ahead_blocks: int) -> Prefault:
    return Prefault(
        executor,
        num_blocks=len(executor.times[0]),
        layers=LAYERS,
        block_bytes=BLOCK_BYTES,
        ahead_bytes=ahead_blocks * BLOCK_BYTES,
    )


def _touch_all(ahead: Prefault, num_never_used: int) -> int:
    calls = 0
    while ahead.touch(num_never_used):
        calls += 1
    return calls


def test_the_requested_number_of_blocks_is_touched_once_in_each_layer() -> None:
    executor = Touched(20)
    ahead = _ahead(executor, ahead_blocks=10)
    assert _touch_all(ahead, 20) == 3 * LAYERS  # pieces of 4, 4 and 2 blocks
    assert executor.times == [[1] * 10 + [0] * 10] * LAYERS
    assert not ahead.touch(20)


def test_used_blocks_are_skipped_and_others_follow() -> None:
    executor = Touched(20)
    ahead = _ahead(executor, ahead_blocks=5)
    _touch_all(ahead, 20)
    assert _touch_all(ahead, 13)  # blocks 0 to 6 are in use
    assert executor.times == [[1] * 5 + [0, 0] + [1] * 5 + [0] * 8] * LAYERS


def test_blocks_used_in_the_middle_of_a_piece_are_skipped() -> None:
    executor = Touched(8)
    ahead = _ahead(executor, ahead_blocks=8)
    assert ahead.touch(8)
    _touch_all(ahead, 5)  # blocks 0 to 2 were allocated after the first layer
    assert executor.times == [[1] * 8, [0] * 3 + [1] * 5, [0] * 3 + [1] * 5]


def test_prefaulting_stops_at_the_end_of_the_pool() -> None:
    executor = Touched(6)
    ahead = _ahead(executor, ahead_blocks=100)
    _touch_all(ahead, 6)
    assert executor.times == [[1] * 6] * LAYERS
    assert not ahead.touch(0)


def test_zero_ahead_touches_nothing() -> None:
    executor = Touched(6)
    assert not _ahead(executor, ahead_blocks=0).touch(6)


@pytest.mark.parametrize("block_bytes", [1, PIECE_BYTES * LAYERS * 10])
def test_tiny_and_huge_blocks_are_touched_whole(block_bytes: int) -> None:
    executor = Touched(6)
    ahead = Prefault(
        executor, num_blocks=6, layers=LAYERS, block_bytes=block_bytes, ahead_bytes=6 * block_bytes
    )
    _touch_all(ahead, 6)
    assert executor.times == [[1] * 6] * LAYERS
