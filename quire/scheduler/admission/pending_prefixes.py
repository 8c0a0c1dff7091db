"""PendingPrefixes: blocks that running requests are about to make findable.

Of requests that begin alike and arrive together, the first computes what they share. The others
wait for the blocks that a step in flight (or the one being put together) computes, where that saves
more than it wastes, and then find them. Knows digests and positions; no budget, no order. Always
holds: a request waits only for blocks that are scheduled, so what holds it up is a step under way.
"""

from __future__ import annotations

import numpy as np

from quire._native import DigestTable
from quire.cache.chain import Uint64s
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState

# Numbers of prompts are reused after so many; never are so many under way.
_MAX_NUMBERS = 1 << 30


class PendingPrefixes:
    """The full blocks of `block_size` tokens of prompts under way, by digest."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pending = DigestTable()  # the number of the prompt that computes it
        self.under_way: dict[int, tuple[SequenceState, Uint64s]] = {}
        self._next_number = 0
        self._ends: dict[int, int] = {}  # by slot, of those admitted into this step

    def begin_step(self, batch: RunningBatch) -> None:
        """Forget prompts that are computed, or that left their slot."""
        self._ends.clear()
        if not self.under_way:
            return
        computed = batch.computed.item
        over = [
            number
            for number, (sequence, _) in self.under_way.items()
            if sequence.slot == NO_SLOT or computed(sequence.slot) >= len(sequence.token_ids)
        ]
        if over:
            self._pending.take(np.concatenate([self.under_way.pop(number)[1] for number in over]))

    def expect(self, sequence: SequenceState, num_found: int, end: int) -> None:
        """Note that `sequence` computes up to token `end` in the step being put together.

        num_found: leading blocks it found in the prefix index.
        """
        if sequence.chain is None:
            return
        self._ends[sequence.slot] = end
        number, digests = self._next_number, sequence.chain.digests[num_found:]
        numbers = np.empty(len(digests), np.int32)
        numbers.fill(number)
        mine = self._pending.put(digests, numbers)
        if len(mine) < len(digests):  # others compute the rest
            digests = digests[mine]
        self.under_way[number] = (sequence, digests)
        self._next_number = (number + 1) % _MAX_NUMBERS

    def holds(
        self, sequence: SequenceState, num_found: int, num_tokens: int, batch: RunningBatch
    ) -> bool:
        """Return whether to wait for the blocks after the first `num_found` of `sequence`.

        That is so where at least half of the `num_tokens` it could compute in this step will be
        there in a few steps without it: to wait for less would waste more of the step than it
        saves.
        """
        if sequence.chain is None:
            return False
        size = self._block_size
        leaders = self._pending.longest_run(sequence.chain.digests[num_found:])
        for at, number in enumerate(leaders.tolist(), num_found):
            if not self._is_pending(self.under_way[number][0], (at + 1) * size, batch):
                return False
            if 2 * (at + 1 - num_found) * size >= num_tokens:
                return True
        return False

    def _is_pending(self, leader: SequenceState, end: int, batch: RunningBatch) -> bool:
        """Return whether a step under way computes the block of `leader` that ends at token `end`.

        A digest stands for all tokens before it, too, so the block ends there wherever it occurs.
        """
        slot = leader.slot
        if slot == NO_SLOT or batch.computed[slot] >= end:
            return False
        return end <= max(int(batch.scheduled[slot]), self._ends.get(slot, 0))
