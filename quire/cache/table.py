"""BlockTable: which pool blocks hold a slot's tokens, in order of position.

Column c of a slot's row is the block of positions c * block_size .. (c + 1) * block_size - 1. Knows
no tokens and no reference counts, and of the request in a slot a name only. Always holds: columns
`firsts[slot]` .. `counts[slot]` - 1 are blocks, the others -1 (those before were given back,
because nothing of them is seen any more); `capacities[slot]` is counts[slot] * block_size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Index = NDArray[np.intp]


_ZERO = np.int32(0)


class BlockTable:
    """`blocks` int32 [num_slots, num_columns]; `firsts`, `counts` and `capacities` [num_slots]."""

    def __init__(self, num_slots: int, num_columns: int, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        # The request in a slot, and the one in the slot that last named a block: numbers of names,
        # for reports of the audit.
        self.holders: Int64s = np.zeros(num_slots, np.int64)
        self.holders_by_block: Int64s = np.zeros(num_blocks, np.int64)
        self._names = {0: ""}
        self._max_names = 2 * (num_slots + num_blocks)
        self._num_named = 0
        self.blocks: Int32s = np.full((num_slots, num_columns), -1, np.int32)
        self.firsts: Int32s = np.zeros(num_slots, np.int32)
        self.counts: Int32s = np.zeros(num_slots, np.int32)
        self.capacities: Int32s = np.zeros(num_slots, np.int32)

    def name(self, slot: int, holder: str) -> None:
        """Note that the request `holder` takes `slot`."""
        self._num_named += 1
        self.holders[slot] = self._num_named
        self._names[self._num_named] = holder
        if len(self._names) > self._max_names:
            used = {0, *self.holders.tolist(), *self.holders_by_block.tolist()}
            self._names = {number: self._names[number] for number in used}

    def holder(self, slot: int) -> str:
        """Return the name of the request that took `slot` last."""
        return self._names[int(self.holders[slot])]

    def last_holders(self) -> NDArray[Any]:
        """Return the name of the request that last held each block, "" for none."""
        return np.array([self._names[number] for number in self.holders_by_block.tolist()], object)

    def row(self, slot: int) -> Int32s:
        """Return the blocks of `slot`, from column firsts[slot] on (a view)."""
        return self.blocks[slot, self.firsts[slot] : self.counts[slot]]

    def held(self) -> NDArray[np.bool_]:
        """Return which entries are blocks, bool [num_slots, num_columns]."""
        columns = np.arange(self.blocks.shape[1])
        held: NDArray[np.bool_] = columns < self.counts[:, None]
        return held & (columns >= self.firsts[:, None])

    def begin(self, slot: int, first: int) -> None:
        """Let `slot`, which is empty, have nothing before column `first`."""
        self.firsts[slot] = self.counts[slot] = first

    def drop(self, slots: Index, firsts: Int32s) -> Int32s:
        """Take from slots[i] (distinct) what it has before column firsts[i], last column first."""
        width = int(firsts.max(initial=0))
        columns = np.arange(width - 1, -1, -1)
        mine = (columns < firsts[:, None]) & (columns >= self.firsts[slots][:, None])
        at, which = mine.nonzero()
        rows, places = slots[at], columns[which]
        blocks: Int32s = self.blocks[rows, places]
        self.blocks[rows, places] = -1
        self.firsts[slots] = np.maximum(self.firsts[slots], firsts)
        return blocks

    def append(self, slot: int, blocks: Int32s) -> None:
        """Put `blocks` behind those of `slot`."""
        first = int(self.counts[slot])
        last = first + len(blocks)
        self.blocks[slot, first:last] = blocks
        self.holders_by_block[blocks] = self.holders[slot]
        self.counts[slot] = last
        self.capacities[slot] = last * self.block_size

    def append_many(self, slots: Index, added: Int32s, blocks: Int32s) -> tuple[Index, Int32s]:
        """Give slots[i] (distinct) its next added[i] >= 1 of `blocks`, in order.

        Returns (slots, columns), each as long as `blocks`.
        """
        first = self.counts[slots]
        counts = first + added
        if len(blocks) == len(slots):
            rows, columns = slots, first
        else:
            rows = slots.repeat(added)
            ends: Int32s = np.add.accumulate(added, dtype=np.int32)
            columns = np.arange(len(blocks), dtype=np.int32)
            columns += (counts - ends).repeat(added)
        self.blocks[rows, columns] = blocks
        self.holders_by_block[blocks] = self.holders[rows]
        self.counts[slots] = counts
        self.capacities[slots] = counts * np.int32(self.block_size)
        return rows, columns

    def blocks_short(self, slots: Index, num_tokens: Int32s) -> Int32s:
        """Return the blocks that slots[i] lacks to hold num_tokens[i] tokens."""
        # Rounded up by rounding down what is left over; -(-x // y) as in blocks_for.
        left = (self.capacities[slots] - num_tokens) // np.int32(self.block_size)
        short: Int32s = -np.minimum(left, _ZERO)
        return short

    def take(self, slots: Index) -> Int32s:
        """Empty `slots` (distinct); return their blocks, last column first within a slot."""
        if len(slots) == 1:
            return self._take_one(int(slots[0]))
        counts = self.counts[slots]
        width = int(counts.max(initial=0))
        columns = np.arange(width - 1, -1, -1)
        held = (columns < counts[:, None]) & (columns >= self.firsts[slots][:, None])
        rows = self.blocks[slots[:, None], columns]
        blocks: Int32s = rows[held]
        self.blocks[slots, :width] = -1
        self.firsts[slots] = 0
        self.counts[slots] = 0
        self.capacities[slots] = 0
        return blocks

    def _take_one(self, slot: int) -> Int32s:
        row = self.row(slot)
        blocks = row[::-1].copy()
        row[:] = -1
        self.firsts[slot] = self.counts[slot] = self.capacities[slot] = 0
        return blocks
