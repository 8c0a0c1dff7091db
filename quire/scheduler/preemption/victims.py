"""Victims: the order of preemption by the policy, then by what coming back costs.

Coming back is moving blocks or recomputing tokens, whichever is predicted to be cheaper. Spared, in
this order: requests that are nearly finished, those with higher priority (the lower number), those
preempted before. Among the others the cheapest for the room they leave come first; where costs are
about the same the policy's order stands: it only decides among equals. Changes nothing and preempts
nothing.
"""

from __future__ import annotations

import math

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.cost.transfer_cost import TransferCost
from quire.scheduler.policy.policy import NEARLY_FINISHED_TOKENS, Policy
from quire.scheduler.running_batch import Index, RunningBatch

# After so many preemptions a request is spared while others have had fewer.
MAX_PREEMPTIONS = 2


class Victims:
    """Sorts policy.victims by what a preemption costs. moving: None without a tier."""

    def __init__(
        self,
        policy: Policy,
        batch: RunningBatch,
        cache: CacheManager,
        speed: SpeedEstimate,
        moving: TransferCost | None,
    ) -> None:
        self._policy = policy
        self._batch = batch
        self._cache = cache
        self._speed = speed
        self._moving = moving

    def victims(self, slots: Index) -> Index:
        """Return `slots` with the first victim first; as Policy.victims."""
        ordered = self._policy.victims(slots)
        if len(ordered) < 2:
            return ordered
        horizon = len(self._batch.active)  # a block each: what running requests take soon
        keys = [self._key(slot, horizon) for slot in ordered.tolist()]
        return ordered[np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)]

    def by_policy(self, slots: Index) -> Index:
        """Return `slots` in the policy's order of preemption."""
        return self._policy.victims(slots)

    def return_ms(self, slot: int) -> tuple[float, bool]:
        """Return the cost of restoring the request in `slot`, and whether by moving its blocks."""
        computed, tiers = int(self._batch.computed[slot]), self._cache.tiers
        lost = min(self._cache.num_freed_by(slot) * self._cache.block_size, computed)
        if self._moving is None or tiers is None or tiers.is_broken:
            return self._speed.span_ms(computed - lost, computed), False
        return self._moving.return_ms(computed - lost, computed)

    def _key(self, slot: int, horizon: int) -> tuple[float, ...]:
        batch, sequence = self._batch, self._batch.sequence(slot)
        left = int(batch.longest[slot]) - int(batch.computed[slot])
        freed = self._cache.num_freed_by(slot)
        per_block_ms = self.return_ms(slot)[0] / min(freed, horizon) if freed else math.inf
        is_costly = math.inf if math.isinf(per_block_ms) else _doublings(per_block_ms)
        return (
            left <= NEARLY_FINISHED_TOKENS,
            -sequence.request.priority,
            sequence.preemption.count // MAX_PREEMPTIONS,
            is_costly,
        )


def _doublings(cost_ms: float) -> float:
    """Return a value that is the same for costs within a factor of about two."""
    return float(round(math.log2(cost_ms))) if cost_ms > 0 else -math.inf
