"""Least tokens: the replica with the fewest open tokens; equals take turns.

Open tokens are those of prompts without output yet, and of expected output, of the requests that
this router has sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.router.policies.policy import PlainPolicy, RouteKey
from quire.router.policies.round_robin import RoundRobin
from quire.router.replica import Replica


class FewestTokens(PlainPolicy):
    """Tokens of prompts without output yet, and of expected output."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, replicas: Sequence[Replica], key: RouteKey) -> Replica:
        """Return the least loaded."""
        least = min(one.backlog_tokens for one in replicas)
        return self._turns.choose([one for one in replicas if one.backlog_tokens == least], key)
