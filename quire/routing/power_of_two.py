"""Power of two, `power-of-two`: of two replicas drawn at random, the one with fewer open tokens.

Nearly as even as least tokens, and several routers that do not know of each other do not all choose
the same replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quire.routing.policy import AnyReplica, PlainPolicy, RouteKey, lightest


class PowerOfTwo(PlainPolicy):
    """seed: of the draws; None for one of the system."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = Random(seed)

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return the less loaded of two."""
        if len(replicas) < 3:
            return lightest(replicas)
        return lightest(self._random.sample(list(replicas), 2))
