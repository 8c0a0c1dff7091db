"""PendingPrefixes: blocks that running requests are about to make findable.

Of requests that begin alike and arrive together, the first computes what they share. The others
wait for the blocks that a step in flight (or the one being put together) computes, where that saves
more than it wastes, and then find them. Knows digests and positions; no budget, no order. Always
holds: a request waits only for blocks that are scheduled, so what holds it up is a step under way.
"""

from __future__ import annotations

import numpy as np

from quire._native import DigestTable
from quire.cache.digest import Uint64s
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState

# Numbers of prompts are reused after so many; never are so many under way.
_MAX_NUMBERS = 1 << 30


class PendingPrefixes:
    """The full blocks of `block_size` tokens of prompts under way, by digest."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._admitted: list[tuple[SequenceState, int, int]] = []  # not in the table yet
        self._pending = DigestTable()  # the number of the prompt that computes it
        self._under_way: dict[int, tuple[SequenceState, Uint64s]] = {}
        self._next_number = 0
        self._ends: dict[int, int] = {}  # by slot, of those entered into the table in this step
        # First digests of all these prompts: a request that begins otherwise shares no block.
        self._first_digests: set[int] = set()

    def begin_step(self, batch: RunningBatch) -> None:
        """Forget prompts that are computed, or that left their slot."""
        self._ends.clear()
        if not self._first_digests:
            return
        self._admitted = [one for one in self._admitted if not _is_over(one[0], batch)]
        over = [n for n, (sequence, _) in self._under_way.items() if _is_over(sequence, batch)]
        if over:
            self._pending.take(np.concatenate([self._under_way.pop(number)[1] for number in over]))
        left = [sequence for sequence, _, _ in self._admitted]
        left += [sequence for sequence, _ in self._under_way.values()]
        self._first_digests = {one.chain.digests.item(0) for one in left if one.chain is not None}

    def admitted(self, sequence: SequenceState, num_found: int, end: int) -> None:
        """Note that `sequence` computes up to token `end` in the step being put together.

        num_found: leading blocks it found in the prefix index. It is entered into the table once a
        request begins like it.
        """
        if sequence.chain is not None and len(sequence.chain.digests):
            self._admitted.append((sequence, num_found, end))
            self._first_digests.add(sequence.chain.digests.item(0))

    def has_start_of(self, sequence: SequenceState) -> bool:
        """Return whether a prompt under way begins with the first block of `sequence`."""
        chain = sequence.chain
        return (
            chain is not None
            and len(chain.digests) > 0
            and (chain.digests.item(0) in self._first_digests)
        )

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
        for one in self._admitted:
            self._expect(*one)
        self._admitted.clear()
        size = self._block_size
        leaders = self._pending.longest_run(sequence.chain.digests[num_found:])
        for at, number in enumerate(leaders.tolist(), num_found):
            if not self._is_pending(self._under_way[number][0], (at + 1) * size, batch):
                return False
            if 2 * (at + 1 - num_found) * size >= num_tokens:
                return True
        return False

    def _expect(self, sequence: SequenceState, num_found: int, end: int) -> None:
        """Enter the blocks that an admitted prompt computes into the table."""
        assert sequence.chain is not None, "admitted prompts have chains"
        self._ends[sequence.slot] = end
        number, digests = self._next_number, sequence.chain.digests[num_found:]
        mine = self._pending.put(digests, np.full(len(digests), number, np.int32))
        if len(mine) < len(digests):  # others compute the rest
            digests = digests[mine]
        self._under_way[number] = (sequence, digests)
        self._next_number = (number + 1) % _MAX_NUMBERS

    def _is_pending(self, leader: SequenceState, end: int, batch: RunningBatch) -> bool:
        """Return whether a step under way computes the block of `leader` that ends at token `end`.

        A digest stands for all tokens before it, too, so the block ends there wherever it occurs.
        """
        slot = leader.slot
        if slot == NO_SLOT or batch.computed[slot] >= end:
            return False
        return end <= max(int(batch.scheduled[slot]), self._ends.get(slot, 0))


def _is_over(sequence: SequenceState, batch: RunningBatch) -> bool:
    """Return whether a prompt is computed, or has left its slot."""
    slot = sequence.slot
    return slot == NO_SLOT or batch.computed.item(slot) >= len(sequence.token_ids)
