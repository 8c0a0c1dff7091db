"""SharedPools: the KV pools of all ranks in one file in memory, so that rank 0 has whole blocks.

Each rank's pool holds the KV heads and the layers of the rank, in a span of the file of its own.
Rank 0 maps all of it, and copies a block as one process would have it: per layer the heads in
order. So blocks are the same bytes at every degree and number of stages, and go to an engine of
others as they are. Blocks that ranks divide by positions are their pieces in order, in each layer.
Knows bytes, layers, pieces and heads; no program and no process. Always holds: spans have one size;
the file has no name, and is freed with the last process that has mapped it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError

Bytes = NDArray[np.uint8]

NONE = -1
# Kernels may read so far beyond a pool (native/include/quire/memory.h).
_SLACK_BYTES = 64
_PAGE_BYTES = 4096


def create_file() -> int:
    """Return the descriptor of an empty file in memory; the caller closes it."""
    try:
        return os.memfd_create("quire-pools", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        raise CapacityError(
            f"the KV caches of ranks cannot lie in shared memory ({error}), from which blocks are "
            "exchanged with other engines; take one rank (--tensor-parallel-size 1)"
        ) from error


@dataclass(frozen=True, slots=True)
class PoolShare:
    """What a rank's pool holds of each block: layers and KV heads, first and end; and under context
    parallelism which piece of its positions."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    piece: int = 0

    def num_bytes(self, num_blocks: int, head_bytes: int) -> int:
        """Return the bytes of a pool. head_bytes: of a head of a pool's block in one layer."""
        (first, end), (first_head, end_head) = self.layers, self.heads
        return (end - first) * num_blocks * (end_head - first_head) * head_bytes

    @property
    def place(self) -> tuple[slice, int, slice, slice]:
        """Where its part is in a whole block, of the shape that whole_shape gives."""
        return slice(*self.layers), self.piece, slice(None), slice(*self.heads)


def whole_shape(
    shares: Sequence[PoolShare], blocks_of_each: int, head_bytes: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of a whole block: layers, pieces, blocks of a pool in each piece, heads and
    bytes of a head. blocks_of_each, head_bytes: as in SharedPools."""
    return (
        max(share.layers[1] for share in shares),
        max(share.piece for share in shares) + 1,
        blocks_of_each,
        max(share.heads[1] for share in shares),
        head_bytes,
    )


def touch_pages(blocks: Bytes) -> None:
    """Write a zero to each page of blocks [blocks, ...] of a layer that were never written."""
    blocks.reshape(len(blocks), -1)[:, ::_PAGE_BYTES] = 0


def span_bytes(pool_bytes: int) -> int:
    """Return the bytes of the file for one rank's pool, of which the largest takes pool_bytes."""
    unit = mmap.ALLOCATIONGRANULARITY
    return -(-(pool_bytes + _SLACK_BYTES) // unit) * unit


def make_room(descriptor: int, span: int, num_ranks: int) -> None:
    """Make the file as large as the spans of all ranks, zero-filled. Raises CapacityError."""
    try:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, num_ranks * span)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"shared memory for the KV caches of {num_ranks} ranks of {span} bytes cannot be "
            f"made: {error}; lower --kv-cache-memory"
        ) from error


def mapped(descriptor: int, rank: int, span: int) -> Bytes:
    """Return the span of one rank, mapped. Raises CapacityError."""
    try:
        memory = mmap.mmap(descriptor, span, offset=rank * span)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"the KV cache of rank {rank}, {span} bytes in shared memory, cannot be mapped: "
            f"{error}; lower --kv-cache-memory"
        ) from error
    with suppress(OSError, AttributeError):  # where the system has none for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


@dataclass(frozen=True, slots=True)
class _Pool:
    """One rank's pool. blocks: [layers, blocks, its own blocks for each, heads, bytes of a head].
    part: where they are in a whole block."""

    blocks: NDArray[np.uint8]
    part: tuple[slice, int, slice, slice]


class SharedPools:
    """The pools as rank 0 sees them. shares: of each rank; a head may be at several. span: bytes of
    the file for each rank. head_bytes: of a head of a pool's block in one layer. blocks_of_each:
    a pool's blocks for each of num_blocks blocks, where these are divided by positions; twice as
    many where keys come before values. first_bytes: where each rank's pool begins in its span.
    """

    def __init__(
        self,
        descriptor: int,
        shares: Sequence[PoolShare],
        *,
        span: int,
        num_blocks: int,
        head_bytes: int,
        blocks_of_each: int = 1,
        first_bytes: Sequence[int] = (),
    ) -> None:
        self._shape = whole_shape(shares, blocks_of_each, head_bytes)
        self._pools = []
        begins = first_bytes or (0,) * len(shares)
        for rank, (share, begin) in enumerate(zip(shares, begins, strict=True)):
            num_bytes = share.num_bytes(num_blocks * blocks_of_each, head_bytes)
            (first, end), (first_head, end_head) = share.layers, share.heads
            blocks = mapped(descriptor, rank, span)[begin : begin + num_bytes].reshape(
                end - first, num_blocks, blocks_of_each, end_head - first_head, head_bytes
            )
            self._pools.append(_Pool(blocks, share.place))

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block over all layers."""
        return math.prod(self._shape)

    def export_block(self, block: int, out: Bytes) -> None:
        """Copy a whole block to out [block_bytes]."""
        whole = out.reshape(self._shape)
        for pool in self._pools:
            whole[pool.part] = pool.blocks[:, block]

    def import_block(self, block: int, raw: Bytes) -> None:
        """Make a block what export_block gave, here or in an engine of another degree."""
        whole = raw.reshape(self._shape)
        for pool in self._pools:
            pool.blocks[:, block] = whole[pool.part]

    def touch(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks of a layer that were never written."""
        for pool in self._pools:
            layers = pool.part[0]
            if layers.start <= layer < layers.stop:
                touch_pages(pool.blocks[layer - layers.start, first:last])


class PoolArray(Protocol):
    """One array of a rank's pool, by blocks of the engine: in memory here, or on a device."""

    @property
    def layers(self) -> int:
        """How many layers it has."""

    @property
    def size(self) -> int:
        """Bytes of a block in one layer."""

    def read(self, block: int) -> Bytes:
        """Return the bytes of a block [layers, size], valid until the next call."""

    def write(self, block: int, part: Bytes) -> None:
        """Make a block these bytes."""

    def touch(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks of a layer that were never written."""


class HostArray:
    """A PoolArray in this process's memory. blocks: [layers, blocks of the engine, bytes]."""

    def __init__(self, blocks: Bytes) -> None:
        self._blocks = blocks

    @property
    def layers(self) -> int:
        """See PoolArray."""
        return len(self._blocks)

    @property
    def size(self) -> int:
        """See PoolArray."""
        return int(self._blocks.shape[2])

    def read(self, block: int) -> Bytes:
        """See PoolArray."""
        return self._blocks[:, block]

    def write(self, block: int, part: Bytes) -> None:
        """See PoolArray."""
        self._blocks[:, block] = part.reshape(self.layers, self.size)

    def touch(self, layer: int, first: int, last: int) -> None:
        """See PoolArray."""
        touch_pages(self._blocks[layer, first:last])


class WholeBlocks(Protocol):
    """Blocks of the pools of all ranks, as rank 0 has them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block over all layers."""

    def export_block(self, block: int, out: Bytes) -> None:
        """Copy a whole block to out [block_bytes]."""

    def import_block(self, block: int, raw: Bytes) -> None:
        """Make a block what export_block gave, here or in an engine of another layout."""

    def touch(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks of a layer that were never written."""


class JoinedPools:
    """The WholeBlocks of pools of several arrays, such as values and their scales: a block is what
    each has of it, one after the other."""

    def __init__(self, parts: Sequence[WholeBlocks]) -> None:
        self._parts = tuple(parts)

    @property
    def block_bytes(self) -> int:
        """See WholeBlocks."""
        return sum(part.block_bytes for part in self._parts)

    def export_block(self, block: int, out: Bytes) -> None:
        """See WholeBlocks."""
        for part, own in self._cut(out):
            part.export_block(block, own)

    def import_block(self, block: int, raw: Bytes) -> None:
        """See WholeBlocks."""
        for part, own in self._cut(raw):
            part.import_block(block, own)

    def touch(self, layer: int, first: int, last: int) -> None:
        """See WholeBlocks."""
        for part in self._parts:
            part.touch(layer, first, last)

    def _cut(self, whole: Bytes) -> Iterator[tuple[WholeBlocks, Bytes]]:
        first = 0
        for part in self._parts:
            yield part, whole[first : first + part.block_bytes]
            first += part.block_bytes
