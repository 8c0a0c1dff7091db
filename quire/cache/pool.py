"""BlockPool: which blocks of the KV pool are free, and how often each of the others is named.

Knows block numbers only: no tokens, no digests, no requests. A free block whose content can
still be found by prefix (`findable`) is handed out last, the one freed longest ago first.
Always holds: a block is referenced (references > 0), or on the stack of plain free blocks, or
in the queue of findable free blocks; never two of these. One owner thread, no locks; all state
lies in arrays made once, and every verb takes many blocks at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import CapacityError

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class BlockPool:
    """`num_blocks` blocks, all free and plain at first; lower numbers are handed out first."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CapacityError(
                f"the KV cache would have {num_blocks} blocks; it needs at least one: "
                "give it more memory or use a smaller block size"
            )
        self.num_blocks = num_blocks
        self.references: Int32s = np.zeros(num_blocks, np.int32)
        # Set by the owner of the prefix index, cleared here when such a block is handed out.
        self.findable: Bools = np.zeros(num_blocks, np.bool_)
        self._stack: Int32s = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._stack_size = num_blocks
        # Findable free blocks in order of freeing. An entry counts only while its stamp is the
        # block's: taking a block out of the middle changes the stamp and leaves the entry stale.
        self._queue: Int32s = np.zeros(2 * num_blocks, np.int32)
        self._queue_stamps: Int64s = np.zeros(2 * num_blocks, np.int64)
        self._queue_head = 0
        self._queue_tail = 0
        self._stamps: Int64s = np.zeros(num_blocks, np.int64)  # 0: not in the queue
        self._next_stamp = 1
        self._num_queued = 0
        self._scratch: Int32s = np.zeros(num_blocks, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, findable ones included."""
        return self._stack_size + self._num_queued

    @property
    def num_free_findable(self) -> int:
        """Free blocks whose content a prefix match would still find."""
        return self._num_queued

    def allocate(self, count: int) -> tuple[Int32s, Int32s]:
        """Hand out `count` blocks, each with one reference.

        Returns (blocks [count], evicted): `evicted` are those of them that were findable until
        now; the caller makes its index forget them. Raises CapacityError if too few are free.
        """
        if count > self.num_free:
            raise CapacityError(
                f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are "
                "free; the scheduler must make room first"
            )
        plain = min(count, self._stack_size)
        top = self._stack_size
        blocks = self._stack[top - plain : top][::-1].copy()
        self._stack_size = top - plain
        evicted = blocks[:0]
        if plain < count:
            evicted = self._pop_oldest(count - plain)
            self.findable[evicted] = False
            blocks = np.concatenate((blocks, evicted))
        self.references[blocks] = 1
        return blocks, evicted

    def share(self, blocks: Int32s) -> None:
        """Add one reference to each of `blocks` (distinct; referenced, or free and findable)."""
        revived = blocks[self.references[blocks] == 0]
        if len(revived):
            self._stamps[revived] = 0
            self._num_queued -= len(revived)
        self.references[blocks] += 1

    def release(self, blocks: Int32s) -> int:
        """Take one reference from each of `blocks` (a block may occur more than once).

        Returns how many became free. Findable ones are remembered in the given order: the
        first of them is handed out before the others.
        """
        np.subtract.at(self.references, blocks, 1)
        freed = blocks[self.references[blocks] == 0]
        if not len(freed):
            return 0
        # A block that lost its last two references in this call occurs twice: keep one.
        order = np.arange(len(freed), dtype=np.int32)
        self._scratch[freed] = order
        freed = freed[self._scratch[freed] == order]
        findable = self.findable[freed]
        if findable.any():
            self._push_queue(freed[findable])
            self._push_stack(freed[~findable])
        else:
            self._push_stack(freed)
        return len(freed)

    def num_freed_by(self, blocks: Int32s) -> int:
        """How many of `blocks` (distinct) would become free if each lost one reference."""
        return int(np.count_nonzero(self.references[blocks] == 1))

    def num_unreferenced(self, blocks: Int32s) -> int:
        """How many of `blocks` are free now."""
        return int(np.count_nonzero(self.references[blocks] == 0))

    def free_blocks(self) -> tuple[Int32s, Int32s]:
        """The books as they stand: (plain free blocks, findable free blocks, oldest first)."""
        return self._stack[: self._stack_size].copy(), self._queued()

    def rebuild(self, references: Int32s) -> None:
        """Replace the reference counts and derive the free blocks anew; keeps the order of age."""
        aged = self._queued()
        self.references[:] = references
        self._stamps[:] = 0
        self._queue_head = self._queue_tail = self._num_queued = 0
        self._push_queue(aged[(references[aged] == 0) & self.findable[aged]])
        free = references == 0
        self._push_queue(
            np.flatnonzero(free & self.findable & (self._stamps == 0)).astype(np.int32)
        )
        plain = np.flatnonzero(free & ~self.findable).astype(np.int32)[::-1]
        self._stack[: len(plain)] = plain
        self._stack_size = len(plain)

    def _push_stack(self, blocks: Int32s) -> None:
        top = self._stack_size
        self._stack[top : top + len(blocks)] = blocks[::-1]
        self._stack_size = top + len(blocks)

    def _push_queue(self, blocks: Int32s) -> None:
        count = len(blocks)
        if self._queue_tail + count > len(self._queue):
            self._compact_queue()
        tail = self._queue_tail
        stamps = np.arange(self._next_stamp, self._next_stamp + count)
        self._next_stamp += count
        self._queue[tail : tail + count] = blocks
        self._queue_stamps[tail : tail + count] = stamps
        self._stamps[blocks] = stamps
        self._queue_tail = tail + count
        self._num_queued += count

    def _pop_oldest(self, count: int) -> Int32s:
        parts: list[Int32s] = []
        missing = count
        while missing:
            head = self._queue_head
            window = self._queue[head : min(head + missing, self._queue_tail)]
            live = self._stamps[window] == self._queue_stamps[head : head + len(window)]
            parts.append(window[live])
            self._queue_head = head + len(window)
            missing -= len(parts[-1])
        blocks = np.concatenate(parts)
        self._stamps[blocks] = 0
        self._num_queued -= count
        return blocks

    def _queued(self) -> Int32s:
        window = self._queue[self._queue_head : self._queue_tail]
        stamps = self._queue_stamps[self._queue_head : self._queue_tail]
        live: Int32s = window[self._stamps[window] == stamps]
        return live

    def _compact_queue(self) -> None:
        blocks = self._queued()
        self._queue[: len(blocks)] = blocks
        self._queue_stamps[: len(blocks)] = self._stamps[blocks]
        self._queue_head, self._queue_tail = 0, len(blocks)
