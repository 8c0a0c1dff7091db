"""KvPool: the cache of keys and values on a device, and its blocks copied within it.

Copies are said in the device's order of work; how blocks leave and come is block_port.py's. Knows
one cache of a program and no steps.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import CapacityError, WorkerError
from quire.base.log import Log
from quire.execute.gpu.device import device_errors
from quire.execute.gpu.device_array import DeviceArray
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.memory import check_left, give_back
from quire.execute.gpu.stream import Stream
from quire.program.program import Program

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]


class KvPool:
    """Of one program on one device; without blocks until they are allocated."""

    def __init__(self, program: Program, device: torch.device, stream: Stream) -> None:
        self._specs, self._device, self._stream = program.caches, device, stream
        self._blocks: CachePool | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        return self.blocks().block_bytes

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return self.blocks().num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of one."""
        return int(self.blocks().values.shape[-2])

    def blocks(self) -> CachePool:
        """Return all of them, as kernels take them."""
        if self._blocks is None:
            raise WorkerError("the cache has not been allocated, or the executor is closed")
        return self._blocks

    def allocate(self, num_blocks: int, block_size: int, memory: Bytes | None = None) -> None:
        """Blocks of zeros, in place of others. memory: zeros that they lie in; None: new memory.
        Raises CapacityError."""
        (spec,) = self._specs  # a program without a cache, such as a draft head, allocates none
        self._blocks = None  # first: there may be no room for both
        give_back(self._device)  # what loading took for a while
        try:
            self._blocks = CachePool.zeros(
                spec.precision,
                layers=spec.layers,
                blocks=num_blocks,
                kv_heads=spec.kv_heads,
                block_size=block_size,
                head_dim=spec.head_dim,
                device=self._device,
                memory=None if memory is None else torch.from_numpy(memory),
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"{num_blocks} cache blocks of {block_size} tokens "
                f"({num_blocks * block_size * spec.token_bytes} bytes) do not fit into the memory "
                f"of {self._device}; lower --kv-cache-memory"
            ) from error
        if left := check_left(self._device):
            Log("executor").event(left)

    def copy(self, copy_from: Int32s, copy_to: Int32s) -> None:
        """Copy whole blocks over all layers, in order."""
        parts = self.parts()
        pairs = list(zip(copy_from.tolist(), copy_to.tolist(), strict=True))

        def copy() -> None:
            for source, target in pairs:
                for part in parts:
                    part[:, target] = part[:, source]

        with device_errors("copies of blocks"):
            self._stream.do(copy)

    def free(self) -> None:
        """Let go of the blocks."""
        self._blocks = None

    def arrays(self, num_blocks: int) -> list[DeviceArray]:
        """Return the parts of a pool by blocks of which each may be several of the pool's."""
        return [DeviceArray(part, num_blocks, self._stream) for part in self.parts()]

    def parts(self) -> list[Tensor]:
        """Return values and, where there are, scales: [layers, blocks, ...] each."""
        pool = self.blocks()
        return [pool.values] if pool.scales is None else [pool.values, pool.scales]
