"""AgeQueue: free blocks in the order in which they came, the oldest taken first.

Knows block numbers only. A block can be taken out of the middle: its stamp changes and its entry is
stale from then on. Always holds: a block is in the queue at most once, and is in it exactly while
its stamp is that of one of the entries. All state lies in arrays made once, which
native operations share (block_operations.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
Int64s = NDArray[np.int64]

_HEAD, _TAIL, _NEXT_STAMP, _SIZE = range(4)


class AgeQueue:
    """Room for all of `num_blocks` blocks; empty at first."""

    def __init__(self, num_blocks: int) -> None:
        self.entries: Index = np.zeros(2 * num_blocks, np.intp)
        self.entry_stamps: Int64s = np.zeros(2 * num_blocks, np.int64)
        self.stamps: Int64s = np.zeros(num_blocks, np.int64)  # 0: not in the queue
        self.state: Int64s = np.array([0, 0, 1, 0], np.int64)  # head, tail, next stamp, size
        self._values = memoryview(self.state.data)  # reads faster

    def __len__(self) -> int:
        return self._values[_SIZE]

    def push(self, blocks: Index) -> None:
        """Add `blocks` (distinct, none of them in the queue), the first of them as the oldest."""
        count = len(blocks)
        if self.state[_TAIL] + count > len(self.entries):
            self._compact()
        tail = self.state[_TAIL]
        stamps = np.arange(self.state[_NEXT_STAMP], self.state[_NEXT_STAMP] + count)
        self.state[_NEXT_STAMP] += count
        self.entries[tail : tail + count] = blocks
        self.entry_stamps[tail : tail + count] = stamps
        self.stamps[blocks] = stamps
        self.state[_TAIL] = tail + count
        self.state[_SIZE] += count

    def pop(self, count: int) -> Index:
        """Remove and return the `count` oldest blocks, oldest first; there must be so many."""
        parts: list[Index] = []
        missing = count
        while missing:
            head = self.state[_HEAD]
            window = self.entries[head : min(head + missing, self.state[_TAIL])]
            live = self.stamps[window] == self.entry_stamps[head : head + len(window)]
            parts.append(window[live])
            self.state[_HEAD] = head + len(window)
            missing -= len(parts[-1])
        blocks = parts[0] if len(parts) == 1 else np.concatenate([self.entries[:0], *parts])
        self.stamps[blocks] = 0
        self.state[_SIZE] -= count
        return blocks

    def take(self, blocks: Index) -> None:
        """Remove `blocks` (distinct, all of them in the queue), wherever they are."""
        self.stamps[blocks] = 0
        self.state[_SIZE] -= len(blocks)

    def blocks(self) -> Index:
        """Return all blocks, oldest first."""
        window = self.entries[self.state[_HEAD] : self.state[_TAIL]]
        live: Index = window[
            self.stamps[window] == self.entry_stamps[self.state[_HEAD] : self.state[_TAIL]]
        ]
        return live

    def clear(self) -> Index:
        """Empty the queue; return what was in it, oldest first."""
        blocks = self.blocks()
        self.stamps[:] = 0
        self.state[_HEAD] = self.state[_TAIL] = self.state[_SIZE] = 0
        return blocks

    def _compact(self) -> None:
        blocks = self.blocks()
        self.entries[: len(blocks)] = blocks
        self.entry_stamps[: len(blocks)] = self.stamps[blocks]
        self.state[_HEAD], self.state[_TAIL] = 0, len(blocks)
