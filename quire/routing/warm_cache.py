"""Warm cache, `warm-cache`: stay with the replica that has the beginning of the prompt.

Of the available replicas the one with the longest known prefix is chosen, unless it has more than
`backlog_tokens` more open tokens than the least loaded one; then the least loaded is. What a
replica has is known from its KV events (BlockSets), else from what was sent there (PrefixHistory).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.routing.block_sets import BlockSets
from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import AnyReplica, PolicyCount, Replica, RouteKey
from quire.routing.prefix_history import BLOCK_BYTES, History

# Of the history's blocks, as the router estimates the lengths of prompts.
_TOKENS_PER_BLOCK = BLOCK_BYTES // 4


class WarmCache:
    """sets: what replicas report; None where they report nothing. matched_blocks_total,
    blocks_total: of the chosen replicas, and of all prompts, by the history."""

    uses_events = True

    def __init__(
        self, history: History, backlog_tokens: int, sets: BlockSets | None = None
    ) -> None:
        self._history = history
        self.sets = sets
        self._backlog_tokens = backlog_tokens
        self._others = LeastTokens()
        self.matched_blocks_total = 0
        self.blocks_total = 0

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the warmest replica that keeps up, else the least loaded."""
        if not (key.blocks or key.hashes) or len(replicas) == 1:
            return self._others.choose(replicas, key)
        matched = self._matched_tokens(replicas, key)
        most = max(matched.values())
        if most:
            warm = [one for one in replicas if matched[one.number] == most]
            chosen = self._others.choose(warm, key)
            least = min(one.backlog_tokens for one in replicas)
            if chosen.backlog_tokens - least <= self._backlog_tokens:
                return chosen
        return self._others.choose(replicas, key)

    def _matched_tokens(self, replicas: Sequence[AnyReplica], key: RouteKey) -> dict[int, int]:
        """Return how much of the prompt each replica has, by its number."""
        mask = 0
        for one in replicas:
            mask |= 1 << one.number
        blocks = self._history.matched_blocks(key.blocks, mask)
        matched = {number: count * _TOKENS_PER_BLOCK for number, count in blocks.items()}
        if self.sets is None or not key.hashes:
            return matched
        reported = self.sets.matched_tokens(key.hashes, key.block_size)
        if not any(reported.get(one.number) for one in replicas):
            return matched  # blocks of isolated tenants are not reported
        return {number: reported.get(number, count) for number, count in matched.items()}

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Note that the replica has the prompt now."""
        if self.sets is not None and key.hashes:
            self.sets.sent(replica.number, key.hashes)
        if key.blocks:
            bit = 1 << replica.number
            matched = self._history.matched_blocks(key.blocks, bit)
            self.matched_blocks_total += matched.get(replica.number, 0)
            self.blocks_total += len(key.blocks)
            self._history.note(key.blocks, replica.number)

    def counts(self) -> Sequence[PolicyCount]:
        """Return the blocks of prompts, and those that their replicas had, by the history."""
        return (
            PolicyCount("prompt_blocks", "Blocks of routed prompts", self.blocks_total),
            PolicyCount(
                "warm_blocks",
                "Blocks of routed prompts that their replica had, by the router's history",
                self.matched_blocks_total,
            ),
        )

    def forget(self, replica: Replica) -> None:
        """Its cache is empty."""
        self._history.forget(replica.number)
        if self.sets is not None:
            self.sets.forget(replica.number)
