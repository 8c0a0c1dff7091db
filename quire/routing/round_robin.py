"""Round robin, `round-robin`: each replica in turn.

Knows neither load nor prompts. Always holds: of replicas that stay available, each is chosen once
before any is chosen twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.routing.policy import AnyReplica, PlainPolicy, RouteKey


class RoundRobin(PlainPolicy):
    """The replica with the next number after the last one chosen."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the next."""
        later = [one for one in replicas if one.number > self._last]
        chosen = min(later or replicas, key=lambda one: one.number)
        self._last = chosen.number
        return chosen
