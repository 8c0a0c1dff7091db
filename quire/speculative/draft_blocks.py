"""DraftBlocks: hands out the KV blocks of a draft model or a head, by slot.

Knows no executor. Always holds: a block has one owner; a slot's blocks hold `capacity` tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
NO_BLOCKS: Int32s = np.empty(0, np.int32)


class DraftBlocks:
    """`num_blocks` blocks of `block_size` tokens. put: sets entries of a slot's block table."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        put: Callable[[int, int, Int32s], None],
    ) -> None:
        self._size, self._put = block_size, put
        self._held: list[Int32s] = [NO_BLOCKS] * num_slots
        self._free = list(range(num_blocks - 1, -1, -1))
        self.capacity: Int32s = np.zeros(num_slots, np.int32)  # tokens, by slot

    @property
    def num_free(self) -> int:
        """Return the blocks that no slot has."""
        return len(self._free)

    def release(self, slot: int) -> None:
        """Take the blocks of a slot back."""
        self._free += self._held[slot].tolist()
        self._held[slot] = NO_BLOCKS
        self.capacity[slot] = 0

    def grow(self, slot: int, least: int, wanted: int) -> None:
        """Give a slot blocks for `wanted` tokens, or what is free if that is enough for `least`."""
        held = len(self._held[slot])
        num = min(-(-wanted // self._size) - held, len(self._free))
        if num < 1 or (held + num) * self._size < least:
            return
        taken = np.array([self._free.pop() for _ in range(num)], np.int32)
        self._held[slot] = np.concatenate((self._held[slot], taken))
        self.capacity[slot] = (held + num) * self._size
        self._put(slot, held, taken)
