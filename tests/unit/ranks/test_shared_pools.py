"""SharedPools: whole blocks out of the pools of ranks, and into those of another degree."""

from __future__ import annotations

import os

import numpy as np
import pytest

from quire.base.errors import CapacityError
from quire.program.degrees import kv_span
from quire.ranks.shared_pools import (
    JoinedPools,
    PoolShare,
    SharedPools,
    create_file,
    make_room,
    mapped,
    span_bytes,
)
from tests.cases import each_case

LAYERS, BLOCKS, HEAD_BYTES = 3, 5, 64


class Pools:
    """The pools of `degree` ranks of a model with so many KV heads, in stages of so many layers."""

    def __init__(self, degree: int, kv_heads: int, stages: tuple[int, ...] = (LAYERS,)) -> None:
        ends = np.cumsum(stages).tolist()
        self.shares = [
            PoolShare((end - layers, end), kv_span(kv_heads, rank, degree))
            for layers, end in zip(stages, ends, strict=True)
            for rank in range(degree)
        ]
        sizes = [share.num_bytes(BLOCKS, HEAD_BYTES) for share in self.shares]
        span = span_bytes(max(sizes))
        descriptor = create_file()
        make_room(descriptor, span, len(self.shares))
        self.shared = SharedPools(
            descriptor, self.shares, span=span, num_blocks=BLOCKS, head_bytes=HEAD_BYTES
        )
        # Each rank's own view, as its process has it.
        self.of_ranks = [
            mapped(descriptor, rank, span)[:size].reshape(
                share.layers[1] - share.layers[0], BLOCKS, -1, HEAD_BYTES
            )
            for rank, (share, size) in enumerate(zip(self.shares, sizes, strict=True))
        ]
        os.close(descriptor)


@each_case(
    ("degree", "kv_heads", "stages"),
    [
        *((1, 4, (3,)), (2, 4, (3,)), (4, 4, (3,)), (4, 2, (3,)), (2, 1, (3,))),
        *((1, 4, (1, 2)), (1, 2, (1, 1, 1)), (2, 4, (2, 1)), (4, 2, (1, 2))),
    ],
)
def test_blocks_are_those_of_one_process_at_every_degree(
    degree: int, kv_heads: int, stages: tuple[int, ...]
) -> None:
    draw = np.random.default_rng(degree * 10 + kv_heads)
    whole = draw.integers(0, 256, (LAYERS, BLOCKS, kv_heads, HEAD_BYTES), np.uint8)
    pools = Pools(degree, kv_heads, stages)
    for share, own in zip(pools.shares, pools.of_ranks, strict=True):
        own[:] = whole[slice(*share.layers), :, slice(*share.heads)]
    out = np.zeros(pools.shared.block_bytes, np.uint8)
    assert pools.shared.block_bytes == LAYERS * kv_heads * HEAD_BYTES
    for block in range(BLOCKS):
        pools.shared.export_block(block, out)
        assert np.array_equal(out, whole[:, block].reshape(-1))
    other = Pools(1, kv_heads)
    other.shared.import_block(2, out)
    assert np.array_equal(other.of_ranks[0][:, 2], whole[:, BLOCKS - 1])
    pools.shared.import_block(0, out)
    for share, own in zip(pools.shares, pools.of_ranks, strict=True):
        part = whole[slice(*share.layers), :, slice(*share.heads)]
        assert np.array_equal(own[:, 0], part[:, BLOCKS - 1])
        assert np.array_equal(own[:, 1:], part[:, 1:])


def test_a_block_divided_by_positions_is_its_pieces_in_order() -> None:
    """Two ranks of two pieces each in blocks of the pool, for two spans of heads."""
    shares = [
        PoolShare((0, LAYERS), (first, first + 1), piece) for first in (0, 1) for piece in (0, 1)
    ]
    num_bytes = shares[0].num_bytes(2 * BLOCKS, HEAD_BYTES)
    span, descriptor = span_bytes(num_bytes), create_file()
    make_room(descriptor, span, len(shares))
    pools = SharedPools(
        descriptor, shares, span=span, num_blocks=BLOCKS, head_bytes=HEAD_BYTES, blocks_of_each=2
    )
    draw = np.random.default_rng(3)
    owns = []
    for rank in range(4):
        own = mapped(descriptor, rank, span)[:num_bytes]
        own[:] = draw.integers(0, 256, num_bytes, np.uint8)
        owns.append(own.reshape(LAYERS, BLOCKS, 2, 1, HEAD_BYTES))
    os.close(descriptor)
    out = np.zeros(pools.block_bytes, np.uint8)
    pools.export_block(3, out)
    whole = out.reshape(LAYERS, 2, 2, 2, HEAD_BYTES)  # by piece, block of the pool and head
    for share, own in zip(shares, owns, strict=True):
        assert np.array_equal(whole[:, share.piece, :, share.heads[0]], own[:, 3, :, 0])
    pools.import_block(1, out)
    assert all(np.array_equal(own[:, 1], own[:, 3]) for own in owns)


def test_pools_of_two_arrays_give_blocks_with_the_one_after_the_other() -> None:
    """Keys before values, and scales after all of them, as the torch executor lays them out."""
    sizes, sides = (HEAD_BYTES, 4), 2
    shares = [PoolShare((0, LAYERS), (rank, rank + 1)) for rank in range(2)]
    begin = sides * shares[0].num_bytes(BLOCKS, sizes[0])
    num_bytes = begin + sides * shares[0].num_bytes(BLOCKS, sizes[1])
    span, descriptor = span_bytes(num_bytes), create_file()
    make_room(descriptor, span, len(shares))
    joined = JoinedPools(
        [
            SharedPools(
                descriptor,
                shares,
                span=span,
                num_blocks=BLOCKS,
                head_bytes=size,
                blocks_of_each=sides,
                first_bytes=[first] * len(shares),
            )
            for size, first in zip(sizes, (0, begin), strict=True)
        ]
    )
    draw = np.random.default_rng(8)
    whole = [draw.integers(0, 256, (LAYERS, BLOCKS, sides, 2, size), np.uint8) for size in sizes]
    for rank in range(2):
        own = mapped(descriptor, rank, span)
        for part, size, first in zip(whole, sizes, (0, begin), strict=True):
            used = own[first : first + sides * shares[0].num_bytes(BLOCKS, size)]
            used.reshape(LAYERS, BLOCKS, sides, 1, size)[:] = part[:, :, :, rank : rank + 1]
    os.close(descriptor)
    out = np.zeros(joined.block_bytes, np.uint8)
    joined.export_block(3, out)
    assert np.array_equal(out, np.concatenate([part[:, 3].reshape(-1) for part in whole]))
    joined.import_block(1, out)
    again = np.zeros(joined.block_bytes, np.uint8)
    joined.export_block(1, again)
    assert np.array_equal(again, out)


def test_touching_writes_zeros_to_blocks_of_every_rank() -> None:
    pools = Pools(2, 4)
    for own in pools.of_ranks:
        own[:] = 7
    pools.shared.touch(1, 2, 4)
    for own in pools.of_ranks:
        assert (own[1, 2:4].reshape(2, -1)[:, 0] == 0).all()
        own[1, 2:4] = 7
        assert (own == 7).all()


def test_touching_a_layer_is_for_the_ranks_of_its_stage() -> None:
    pools = Pools(1, 4, (2, 1))
    for own in pools.of_ranks:
        own[:] = 7
    pools.shared.touch(2, 0, 1)
    assert (pools.of_ranks[0] == 7).all()
    assert (pools.of_ranks[1][0, 0].reshape(-1)[0] == 0).all()
    assert (pools.of_ranks[1][0, 1:] == 7).all()


def test_pools_begin_at_pages_and_have_room_after_them() -> None:
    assert span_bytes(1) % 4096 == 0
    assert span_bytes(4096) > 4096 + 63
    descriptor = create_file()
    with pytest.raises(CapacityError, match="kv-cache-memory"):
        make_room(descriptor, 1 << 62, 2)
    os.close(descriptor)
