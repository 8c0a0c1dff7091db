"""AgeQueue: free blocks in the order in which they came, the oldest taken first.

Knows block numbers only. A block can be taken out of the middle: its stamp changes and its entry is
stale from then on. Always holds: a block is in the queue at most once, and is in it exactly while
its stamp is that of one of the entries. All state lies in arrays made once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int64s = NDArray[np.int64]


class AgeQueue:
    """Room for all of `num_blocks` blocks; empty at first. size: how many are in it."""

    def __init__(self, num_blocks: int) -> None:
        self._entries: Index = np.zeros(2 * num_blocks, np.intp)
        self._entry_stamps: Int64s = np.zeros(2 * num_blocks, np.int64)
        self._head = 0
        self._tail = 0
        self._stamps: Int64s = np.zeros(num_blocks, np.int64)  # 0: not in the queue
        self._next_stamp = 1
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def push(self, blocks: Index) -> None:
        """Add `blocks` (distinct, none of them in the queue), the first of them as the oldest."""
        count = len(blocks)
        if self._tail + count > len(self._entries):
            self._compact()
        tail = self._tail
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        self._entries[tail : tail + count] = blocks
        self._entry_stamps[tail : tail + count] = stamps
        self._stamps[blocks] = stamps
        self._tail = tail + count
        self.size += count

    def pop(self, count: int) -> Index:
        """Remove and return the `count` oldest blocks, oldest first; there must be so many."""
        parts: list[Index] = []
        missing = count
        while missing:
            head = self._head
            window = self._entries[head : min(head + missing, self._tail)]
            live = self._stamps[window] == self._entry_stamps[head : head + len(window)]
            parts.append(window[live])
            self._head = head + len(window)
            missing -= len(parts[-1])
        blocks = parts[0] if len(parts) == 1 else np.concatenate([self._entries[:0], *parts])
        self._stamps[blocks] = 0
        self.size -= count
        return blocks

    def take(self, blocks: Index) -> None:
        """Remove `blocks` (distinct, all of them in the queue), wherever they are."""
        self._stamps[blocks] = 0
        self.size -= len(blocks)

    def blocks(self) -> Index:
        """Return all blocks, oldest first."""
        window = self._entries[self._head : self._tail]
        live: Index = window[self._stamps[window] == self._entry_stamps[self._head : self._tail]]
        return live

    def clear(self) -> Index:
        """Empty the queue; return what was in it, oldest first."""
        blocks = self.blocks()
        self._stamps[:] = 0
        self._head = self._tail = self.size = 0
        return blocks

    def _compact(self) -> None:
        blocks = self.blocks()
        self._entries[: len(blocks)] = blocks
        self._entry_stamps[: len(blocks)] = self._stamps[blocks]
        self._head, self._tail = 0, len(blocks)
