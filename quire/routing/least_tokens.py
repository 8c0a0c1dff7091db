"""Least tokens: the replica with the fewest open tokens; equals take turns.

Open tokens are those of prompts without output yet, and of expected output, of the requests that
this router has sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.routing.policy import AnyReplica, PlainPolicy, RouteKey
from quire.routing.round_robin import RoundRobin


class LeastTokens(PlainPolicy):
    """Tokens of prompts without output yet, and of expected output."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the least loaded. Each load is read once: other processes may change it."""
        loads = [one.backlog_tokens for one in replicas]
        pairs, least = zip(replicas, loads, strict=True), min(loads)
        return self._turns.choose([one for one, load in pairs if load == least], key)
