"""RankPools: the KV pools of all ranks, so that rank 0 has whole blocks.

A pool is one or more arrays: that of the native executor has keys and values of a head together;
those of the torch executor are values and, where these are integers or fp8, their scales, with keys
before values in both (quire/execute/gpu/kernels/cache_layout.py). Each array is a pool of
shared_pools.py, or of connected_pools.py where ranks share no memory, and a block of the engine is
what the arrays have of it, one after the other: the bytes that one process exports. Knows pools and
shares; no program's operations and no process. Always holds: the pools of all ranks are allocated
before a block leaves or comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from quire.base.errors import DeviceLost
from quire.program.declarations import KV_SCALE_BYTES, CacheSpec
from quire.ranks.connected_pools import BlockEnd, ConnectedPools
from quire.ranks.shared_pools import (
    NONE,
    JoinedPools,
    PoolArray,
    PoolShare,
    SharedPools,
    WholeBlocks,
    make_room,
    span_bytes,
)

SIDES = 2  # keys and values, where a pool has them apart


def head_bytes_of(spec: CacheSpec, block_size: int) -> tuple[int, ...]:
    """Return the bytes of a head's keys in a block of one layer, of each array of a pool."""
    if spec.scheme:
        return block_size * spec.head_dim, block_size * KV_SCALE_BYTES
    return (block_size * spec.head_dim * spec.dtype.itemsize,)


class RankPools:
    """Of all ranks, at rank 0. shares: of each rank. pool_file: the file of all pools, which it
    duplicates; NONE: ranks share no memory, and `ends` are those of the links to them. lost: ends
    the group and returns the error to raise. sides: 2 where keys come before values, 1 where a head
    has them together."""

    def __init__(
        self,
        shares: Sequence[PoolShare],
        *,
        pool_file: int,
        ends: Mapping[int, BlockEnd],
        lost: Callable[[str], DeviceLost],
        sides: int,
    ) -> None:
        self.shares, self.ends, self._lost, self._sides = shares, ends, lost, sides
        self.pool_file = NONE if pool_file == NONE else os.dup(pool_file)
        self.span = 0
        self._num_allocations = 0

    def make_room(self, num_blocks: int, of_each: int, head_bytes: Sequence[int]) -> None:
        """Let the file have room for the pools of all ranks, before they are allocated. of_each:
        a rank's blocks for each of num_blocks blocks. Raises CapacityError."""
        if self.pool_file != NONE:
            self.span = span_bytes(
                max(
                    sum(self._sizes(share, num_blocks * of_each, head_bytes))
                    for share in self.shares
                )
            )
            make_room(self.pool_file, self.span, len(self.shares))

    def joined(
        self,
        own: Callable[[], Sequence[PoolArray]],
        num_blocks: int,
        of_each: int,
        head_bytes: Sequence[int],
    ) -> WholeBlocks:
        """Return the whole blocks, once the pools are allocated. own: the arrays of rank 0."""
        self._num_allocations += 1
        if self.pool_file == NONE:
            lock = threading.Lock()
            arrays = enumerate(zip(own(), head_bytes, strict=True))
            return JoinedPools(
                [
                    ConnectedPools(
                        array,
                        self.ends,
                        self.shares,
                        head_bytes=size,
                        blocks_of_each=self._sides * of_each,
                        allocation=self._num_allocations,
                        lost=self._lost,
                        section=section,
                        lock=lock,
                    )
                    for section, (array, size) in arrays
                ]
            )
        begins = [
            [0, *accumulate(self._sizes(share, num_blocks * of_each, head_bytes))]
            for share in self.shares
        ]
        return JoinedPools(
            [
                SharedPools(
                    self.pool_file,
                    self.shares,
                    span=self.span,
                    num_blocks=num_blocks,
                    head_bytes=size,
                    blocks_of_each=self._sides * of_each,
                    first_bytes=[of_rank[section] for of_rank in begins],
                )
                for section, size in enumerate(head_bytes)
            ]
        )

    def close(self) -> None:
        """Let go of the file."""
        if self.pool_file != NONE:
            os.close(self.pool_file)
            self.pool_file = NONE

    def _sizes(self, share: PoolShare, num_blocks: int, head_bytes: Sequence[int]) -> list[int]:
        """Return bytes of the arrays of a rank's pool."""
        return [self._sides * share.num_bytes(num_blocks, size) for size in head_bytes]
