"""ConnectedPools: whole blocks out of the pools of ranks that share no memory, over links, equal to
those of one file in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from quire.base.errors import DeviceLost
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank, create_segment
from quire.ranks import connected_pools
from quire.ranks.connected_pools import (
    Ask,
    ConnectedPools,
    Kind,
    PoolServer,
    block_ends,
    block_link_bytes,
    end_servers,
    read_ask,
)
from quire.ranks.shared_pools import HostArray, PoolShare

SIZES = SegmentSizes(slot_bytes=64, message_bytes=64)
BLOCKS, HEAD_BYTES = 5, 96
# Layers 0 to 2, four heads: by heads, by stages, both, and by positions; heads at two ranks.
LAYOUTS = {
    "heads": [PoolShare((0, 3), (0, 2)), PoolShare((0, 3), (2, 4))],
    "stages": [PoolShare((2, 3), (0, 4)), PoolShare((0, 1), (0, 4)), PoolShare((1, 2), (0, 4))],
    "heads of stages": [
        PoolShare(layers, heads) for layers in ((1, 3), (0, 1)) for heads in ((0, 2), (2, 4))
    ],
    "the same heads": [PoolShare((0, 3), (0, 4)), PoolShare((0, 3), (0, 4))],
    "positions": [PoolShare((0, 3), (0, 4), piece) for piece in (0, 1)],
}


class Ranks:
    """Ranks as threads, with a segment for all: what the links do does not depend on it."""

    def __init__(self, shares: list[PoolShare], blocks_of_each: int = 1) -> None:
        degree = len(shares)
        segment = create_segment(degree, SIZES, link_bytes=block_link_bytes(degree))
        self.groups = [
            SharedMemoryRank(segment, rank=rank, degree=degree, sizes=SIZES, timeout_s=10)
            for rank in range(degree)
        ]
        os.close(segment)
        used = SIZES.total(degree)
        self.shares, self.of_each, self.lost = shares, blocks_of_each, ""
        self.ends = block_ends(self.groups[0], used)
        self.servers = [PoolServer(group, block_ends(group, used)[0]) for group in self.groups[1:]]
        for server in self.servers:
            server.start()
        self.pools = self.allocated(1)

    def allocated(self, number: int) -> ConnectedPools:
        """Allocate all pools, filled with noise; those of other ranks after rank 0's."""
        draw = np.random.default_rng(number)
        self.of_ranks = [
            draw.integers(
                0,
                256,
                (share.layers[1] - share.layers[0], BLOCKS, self._block_bytes(share)),
                np.uint8,
            )
            for share in self.shares
        ]
        self.pools = ConnectedPools(
            HostArray(self.of_ranks[0]),
            self.ends,
            self.shares,
            head_bytes=HEAD_BYTES,
            blocks_of_each=self.of_each,
            allocation=number,
            lost=self._lose,
        )
        return self.pools

    def _block_bytes(self, share: PoolShare) -> int:
        return self.of_each * (share.heads[1] - share.heads[0]) * HEAD_BYTES

    def serve(self) -> None:
        """Let the servers have their pools."""
        for server, own in zip(self.servers, self.of_ranks[1:], strict=True):
            server.set_pool(HostArray(own))

    def part(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """Return a rank's part of a whole block."""
        share = self.shares[rank]
        shaped = whole.reshape(3, -1, self.of_each, 4, HEAD_BYTES)
        return shaped[share.place].reshape(len(self.of_ranks[rank]), -1)

    def _lose(self, found: str) -> DeviceLost:
        self.lost = found
        return DeviceLost(found)

    def end(self) -> None:
        """End the threads."""
        end_servers(self.ends.values())
        for server in self.servers:
            server.join()


@contextmanager
def ranks(shares: list[PoolShare], blocks_of_each: int = 1) -> Iterator[Ranks]:
    """Make ranks, and end their threads."""
    made = Ranks(shares, blocks_of_each)
    try:
        made.serve()
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_leave_and_enter_whole(name: str) -> None:
    with ranks(LAYOUTS[name], 2 if name == "positions" else 1) as made:
        out = np.zeros(made.pools.block_bytes, np.uint8)
        made.pools.export_block(3, out)
        for rank, own in enumerate(made.of_ranks):
            if name != "the same heads" or rank == 1:  # the last one of several is taken
                np.testing.assert_array_equal(made.part(out, rank), own[:, 3])
        before = [own.copy() for own in made.of_ranks]
        made.pools.import_block(1, out)
        for rank, own in enumerate(made.of_ranks):
            np.testing.assert_array_equal(own[:, 1], made.part(out, rank))
            others = [0, 2, 3, 4]
            np.testing.assert_array_equal(own[:, others], before[rank][:, others])


def test_a_part_may_be_larger_than_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    small = connected_pools.LinkSizes(slot_bytes=64, slots=2)
    monkeypatch.setattr(connected_pools, "_PIECES", small)
    with ranks(LAYOUTS["heads of stages"]) as made:
        out = np.zeros(made.pools.block_bytes, np.uint8)
        made.pools.export_block(0, out)
        made.pools.import_block(4, out)
        for own in made.of_ranks:
            np.testing.assert_array_equal(own[:, 4], own[:, 0])


def test_touching_is_for_the_ranks_of_the_layer() -> None:
    with ranks(LAYOUTS["heads of stages"]) as made:
        before = [own.copy() for own in made.of_ranks]
        made.pools.touch(0, 1, 3)  # ranks 2 and 3 have it
        for rank, own in enumerate(made.of_ranks):
            expected = before[rank]
            if rank >= 2:
                expected[0, 1:3, 0] = 0  # the first byte of a page, of which a block has one
            np.testing.assert_array_equal(own, expected)


def test_an_ask_waits_for_the_pool_that_it_is_about() -> None:
    """Rank 0 may have allocated a cache again and ask, before another rank has."""
    with ranks(LAYOUTS["heads"]) as made:
        pools = made.allocated(2)
        out = np.zeros(pools.block_bytes, np.uint8)
        exporting = threading.Thread(target=pools.export_block, args=(2, out))
        exporting.start()
        exporting.join(0.1)
        assert exporting.is_alive()
        made.serve()
        exporting.join(30)
        for rank, own in enumerate(made.of_ranks):
            np.testing.assert_array_equal(made.part(out, rank), own[:, 2])


def test_threads_ask_one_after_another() -> None:
    with ranks(LAYOUTS["heads"]) as made:
        out = [np.zeros(made.pools.block_bytes, np.uint8) for _ in range(BLOCKS)]
        threads = [
            threading.Thread(target=made.pools.export_block, args=(block, out[block]))
            for block in range(BLOCKS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for block, whole in enumerate(out):
            for rank, own in enumerate(made.of_ranks):
                np.testing.assert_array_equal(made.part(whole, rank), own[:, block])


def test_a_lost_rank_ends_the_group() -> None:
    with ranks(LAYOUTS["heads"]) as made:
        made.groups[1].abort()
        with pytest.raises(DeviceLost, match="cannot go on"):
            made.pools.export_block(0, np.zeros(made.pools.block_bytes, np.uint8))
        assert "cannot go on" in made.lost


def test_an_error_of_a_rank_ends_the_group() -> None:
    made = Ranks(LAYOUTS["heads"])
    made.servers[0].set_pool(HostArray(made.of_ranks[1][:, :2]))  # a block that is not there
    failed = []
    threading.excepthook, before = lambda args: failed.append(args.exc_type), threading.excepthook
    try:
        with pytest.raises(DeviceLost):
            made.pools.export_block(4, np.zeros(made.pools.block_bytes, np.uint8))
        made.end()
    finally:
        threading.excepthook = before
    assert failed == [IndexError]


def test_an_ask_is_read_as_it_was_written() -> None:
    ask = Ask(Kind.TOUCH, 3, 1, 4, 9)
    assert read_ask(ask.packed()) == ask
    for message in (b"", ask.packed()[:-1], bytes(len(ask.packed()))):
        with pytest.raises(DeviceLost, match="other words"):
            read_ask(message)
