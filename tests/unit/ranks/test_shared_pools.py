"""SharedPools: whole blocks out of the pools of ranks, and into those of another degree."""

from __future__ import annotations

import os

import numpy as np
import pytest

from quire.base.errors import CapacityError
from quire.program.degrees import kv_span
from quire.ranks.shared_pools import SharedPools, create_file, make_room, mapped, span_bytes

LAYERS, BLOCKS, HEAD_BYTES = 3, 5, 64


class Pools:
    """The pools of `degree` ranks of a model with so many KV heads."""

    def __init__(self, degree: int, kv_heads: int) -> None:
        self.heads = [kv_span(kv_heads, rank, degree) for rank in range(degree)]
        own = self.heads[0][1] - self.heads[0][0]
        shape = (LAYERS, BLOCKS, own * HEAD_BYTES)
        self.pool_bytes = LAYERS * BLOCKS * own * HEAD_BYTES
        descriptor = create_file()
        make_room(descriptor, self.pool_bytes, degree)
        self.shared = SharedPools(descriptor, self.heads, shape)
        # Each rank's own view, as its process has it.
        self.of_ranks = [
            mapped(descriptor, rank, self.pool_bytes)[: self.pool_bytes].reshape(
                LAYERS, BLOCKS, own, HEAD_BYTES
            )
            for rank in range(degree)
        ]
        os.close(descriptor)


@pytest.mark.parametrize(("degree", "kv_heads"), [(1, 4), (2, 4), (4, 4), (4, 2), (2, 1)])
def test_blocks_are_those_of_one_process_at_every_degree(degree: int, kv_heads: int) -> None:
    draw = np.random.default_rng(degree * 10 + kv_heads)
    whole = draw.integers(0, 256, (LAYERS, BLOCKS, kv_heads, HEAD_BYTES), np.uint8)
    pools = Pools(degree, kv_heads)
    for (first, end), own in zip(pools.heads, pools.of_ranks, strict=True):
        own[:] = whole[:, :, first:end]
    out = np.zeros(pools.shared.block_bytes, np.uint8)
    assert pools.shared.block_bytes == LAYERS * kv_heads * HEAD_BYTES
    for block in range(BLOCKS):
        pools.shared.export_block(block, out)
        assert np.array_equal(out, whole[:, block].reshape(-1))
    other = Pools(1, kv_heads)
    other.shared.import_block(2, out)
    assert np.array_equal(other.of_ranks[0][:, 2], whole[:, BLOCKS - 1])
    pools.shared.import_block(0, out)
    for (first, end), own in zip(pools.heads, pools.of_ranks, strict=True):
        assert np.array_equal(own[:, 0], whole[:, BLOCKS - 1, first:end])
        assert np.array_equal(own[:, 1:], whole[:, 1:, first:end])


def test_touching_writes_zeros_to_blocks_of_every_rank() -> None:
    pools = Pools(2, 4)
    for own in pools.of_ranks:
        own[:] = 7
    pools.shared.touch(1, 2, 4)
    for own in pools.of_ranks:
        assert (own[1, 2:4].reshape(2, -1)[:, 0] == 0).all()
        own[1, 2:4] = 7
        assert (own == 7).all()


def test_pools_begin_at_pages_and_have_room_after_them() -> None:
    assert span_bytes(1) % 4096 == 0
    assert span_bytes(4096) > 4096 + 63
    descriptor = create_file()
    with pytest.raises(CapacityError, match="kv-cache-memory"):
        make_room(descriptor, 1 << 62, 2)
    os.close(descriptor)
