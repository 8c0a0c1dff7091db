"""SharedPools: the KV pools of all ranks in one file in memory, so that rank 0 has whole blocks.

Each rank's pool holds the KV heads of the rank, in a span of the file of its own. Rank 0 maps all
of it, and copies a block as one process would have it: per layer the heads in order. So blocks are
the same bytes at every degree, and go to an engine of another degree as they are. Knows bytes and
heads; no program and no process. Always holds: the file has no name, and is freed with the last
process that has mapped it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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


def span_bytes(pool_bytes: int) -> int:
    """Return the bytes of the file for one rank's pool."""
    unit = mmap.ALLOCATIONGRANULARITY
    return -(-(pool_bytes + _SLACK_BYTES) // unit) * unit


def make_room(descriptor: int, pool_bytes: int, num_ranks: int) -> None:
    """Make the file as large as the pools of all ranks, zero-filled. Raises CapacityError."""
    try:
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, num_ranks * span_bytes(pool_bytes))
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"shared memory for the KV caches of {num_ranks} ranks of {pool_bytes} bytes cannot be "
            f"made: {error}; lower --kv-cache-memory"
        ) from error


def mapped(descriptor: int, rank: int, pool_bytes: int) -> Bytes:
    """Return the span of one rank, mapped. Raises CapacityError."""
    size = span_bytes(pool_bytes)
    try:
        memory = mmap.mmap(descriptor, size, offset=rank * size)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"the KV cache of rank {rank}, {pool_bytes} bytes in shared memory, cannot be mapped: "
            f"{error}; lower --kv-cache-memory"
        ) from error
    with suppress(OSError, AttributeError):  # where the system has none for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


@dataclass(frozen=True, slots=True)
class _Pool:
    """One rank's pool. blocks: [layers, blocks, heads, bytes of a head]; first: its first head."""

    blocks: NDArray[np.uint8]
    first: int

    @property
    def end(self) -> int:
        return self.first + int(self.blocks.shape[2])


class SharedPools:
    """The pools as rank 0 sees them. heads: of each rank, first and end; a head may be at several.

    shape: layers, blocks, and bytes of a layer of a block, of one rank.
    """

    def __init__(
        self, descriptor: int, heads: Sequence[tuple[int, int]], shape: tuple[int, int, int]
    ) -> None:
        layers, num_blocks, layer_bytes = shape
        pool_bytes = layers * num_blocks * layer_bytes
        self._num_heads = max(end for _, end in heads)
        self._pools = []
        for rank, (first, end) in enumerate(heads):
            span = mapped(descriptor, rank, pool_bytes)[:pool_bytes]
            self._pools.append(_Pool(span.reshape(layers, num_blocks, end - first, -1), first))
        self._layers, self._head_bytes = layers, self._pools[0].blocks.shape[3]

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block over all layers."""
        return int(self._layers * self._num_heads * self._head_bytes)

    def export_block(self, block: int, out: Bytes) -> None:
        """Copy a whole block to out [block_bytes]."""
        whole = out.reshape(self._layers, self._num_heads, self._head_bytes)
        for pool in self._pools:
            whole[:, pool.first : pool.end] = pool.blocks[:, block]

    def import_block(self, block: int, raw: Bytes) -> None:
        """Make a block what export_block gave, here or in an engine of another degree."""
        whole = raw.reshape(self._layers, self._num_heads, self._head_bytes)
        for pool in self._pools:
            pool.blocks[:, block] = whole[:, pool.first : pool.end]

    def touch(self, layer: int, first: int, last: int) -> None:
        """Write a zero to each page of blocks that were never written."""
        for pool in self._pools:
            blocks = pool.blocks[layer, first:last].reshape(last - first, -1)
            blocks[:, ::_PAGE_BYTES] = 0
