"""Coming blocks: what running requests are about to make findable, so that nobody makes it twice.

Of requests that begin alike and come at once, the first computes what they share; the others wait
for the blocks that a step in flight (or the one being put together) computes, where that spares
more than it wastes, and then find them. Knows digests and positions; no budget, no order. Always
holds: nobody waits for a block that is not scheduled, so whoever is held up is held up by a step
that is under way.
"""

from __future__ import annotations

from quire.scheduler.state import RunningState
from quire.scheduler.ticket import NO_SLOT, Ticket


class ComingBlocks:
    """The full blocks of `block_size` tokens of prompts under way, by digest."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._coming: dict[bytes, Ticket] = {}  # who computes it
        self._under_way: list[tuple[Ticket, tuple[bytes, ...]]] = []
        self._ends: dict[int, int] = {}  # by slot, of those admitted into this step

    def begin_step(self, state: RunningState) -> None:
        """A new step is put together: forget what is computed and who is gone."""
        self._ends.clear()
        if not self._under_way:
            return
        going_on = []
        for ticket, keys in self._under_way:
            if ticket.slot != NO_SLOT and state.computed[ticket.slot] < len(ticket.token_ids):
                going_on.append((ticket, keys))
                continue
            for key in keys:
                del self._coming[key]
        self._under_way = going_on

    def expect(self, ticket: Ticket, num_found: int, end: int) -> None:
        """`ticket` runs from this step on, up to token `end` in it; it found `num_found` blocks."""
        if ticket.chain is None:
            return
        self._ends[ticket.slot] = end
        coming, mine = self._coming, ticket.chain.keys[num_found:]
        if not coming.keys().isdisjoint(mine):
            mine = tuple(key for key in mine if key not in coming)
        coming.update(dict.fromkeys(mine, ticket))
        self._under_way.append((ticket, mine))

    def holds(self, ticket: Ticket, num_found: int, num_tokens: int, state: RunningState) -> bool:
        """Whether to wait for the blocks after the first `num_found`, which `ticket` finds.

        That is so where at least half of the `num_tokens` it could compute in this step will be
        there in a few steps without it: to wait for less would waste more of the step than it
        spares.
        """
        if ticket.chain is None:
            return False
        size, keys = self._block_size, ticket.chain.keys
        for at in range(num_found, len(keys)):
            if not self._is_coming(keys[at], (at + 1) * size, state):
                return False
            if 2 * (at + 1 - num_found) * size >= num_tokens:
                return True
        return False

    def _is_coming(self, key: bytes, end: int, state: RunningState) -> bool:
        """Whether a step under way computes the block of this digest, which ends at token `end`
        wherever it occurs: a digest is of all tokens before, too."""
        leader = self._coming.get(key)
        if leader is None:
            return False
        slot = leader.slot
        if slot == NO_SLOT or state.computed[slot] >= end:
            return False
        return end <= max(int(state.scheduled[slot]), self._ends.get(slot, 0))
