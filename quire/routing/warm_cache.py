"""Warm cache: stay with the replica that has the beginning of the prompt, while it keeps up.

Of the available replicas the one with the most known blocks is chosen, unless it has more than
`backlog_tokens` more open tokens than the least loaded one; then the least loaded is. What a
replica has is known from what was sent there (PrefixHistory).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.routing.fewest_tokens import FewestTokens
from quire.routing.policy import AnyReplica, Replica, RouteKey
from quire.routing.prefix_history import PrefixHistory


class WarmCache:
    """matched_blocks_total, blocks_total: of the chosen replicas, and of all prompts."""

    def __init__(self, history: PrefixHistory, backlog_tokens: int) -> None:
        self._history = history
        self._backlog_tokens = backlog_tokens
        self._others = FewestTokens()
        self.matched_blocks_total = 0
        self.blocks_total = 0

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the warmest replica that keeps up, else the least loaded."""
        if not key.blocks or len(replicas) == 1:
            return self._others.choose(replicas, key)
        mask = 0
        for one in replicas:
            mask |= 1 << one.number
        matched = self._history.matched_blocks(key.blocks, mask)
        most = max(matched.values())
        if most:
            warm = [one for one in replicas if matched[one.number] == most]
            chosen = self._others.choose(warm, key)
            least = min(one.backlog_tokens for one in replicas)
            if chosen.backlog_tokens - least <= self._backlog_tokens:
                return chosen
        return self._others.choose(replicas, key)

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Note that the replica has the prompt now."""
        if key.blocks:
            bit = 1 << replica.number
            matched = self._history.matched_blocks(key.blocks, bit)
            self.matched_blocks_total += matched.get(replica.number, 0)
            self.blocks_total += len(key.blocks)
            self._history.note(key.blocks, replica.number)

    def forget(self, replica: Replica) -> None:
        """Its cache is empty."""
        self._history.forget(replica.number)
