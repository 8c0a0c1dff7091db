"""DeviceArray: an array of a KV pool on a device, read and written block by block from the host.

For ranks that share no memory: whole blocks are put together at rank 0, and a thread of each other
rank reads and writes its part. Copies go through a stream of their own. Knows no program and no
rank. Always holds: a block is read once all that was queued before for it is done, as the caller
makes sure; what was written lies on the device when the call returns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch import uint8 as torch_uint8

from quire.execute.gpu.device import device_errors
from quire.execute.gpu.stream import Stream

Bytes = NDArray[np.uint8]


class DeviceArray:
    """A PoolArray (see quire/ranks/shared_pools.py) of a part [layers, blocks, ...] of a pool.

    num_blocks: of the engine, each of which may be several of the pool. One thread at a time.
    """

    def __init__(self, part: Tensor, num_blocks: int, stream: Stream) -> None:
        self._blocks = part.flatten(1).view(torch_uint8).view(len(part), num_blocks, -1)
        self._stream = stream.beside()
        self._stream.behind(stream.mark())  # the zeros that it was made with
        layers, _, size = self._blocks.shape
        self._room = self._stream.host_memory(layers * size).view(layers, size)

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return int(self._blocks.shape[0])

    @property
    def size(self) -> int:
        """Bytes of a block in one layer."""
        return int(self._blocks.shape[2])

    def read(self, block: int) -> Bytes:
        """Return the bytes of a block [layers, size], valid until the next call."""
        with device_errors("copies of blocks to the host"):
            self._stream.copy(self._blocks[:, block], self._room)
            self._stream.mark(sleeps=True).wait()
        found: Bytes = self._room.numpy()
        return found

    def write(self, block: int, part: Bytes) -> None:
        """Make a block these bytes."""
        with device_errors("copies of blocks from the host"):
            self._room.numpy()[:] = part.reshape(self._room.shape)
            self._stream.copy(self._room, self._blocks[:, block])
            self._stream.mark(sleeps=True).wait()

    def touch(self, layer: int, first: int, last: int) -> None:
        """Nothing: a device's memory is there when it is allocated."""
