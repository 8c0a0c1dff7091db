"""FairShare, `fair`: each tenant gets its weight's share of the tokens.

The virtual token counter of "Fairness in Serving Large Language Models". A tenant's counter is the
number of tokens it was served over its weight; generated ones count twice. The waiting request of
the tenant with the smallest counter is next. A tenant that returns after a time without waiting
requests begins level with those that wait, so that none saves up. Counters move on events only:
running requests are settled when counters are read. What is recomputed after a preemption is not
charged again.

Being next is not enough beside a flood, which fills the steps, the slots and the blocks. So a
tenant that recently had less than a quarter of another's tokens counts as flooded by it: it goes
first, the other's rows pause and none of its prompts begins while its own is computed, and it
preempts one of them if there is no free slot. "Recently" is a number of tokens served to all
tenants, not a time: nothing here depends on a machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.interfaces import OutputLengths
from quire.scheduler.policy.policy import Policy
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# A tenant with so many times the recent tokens of another floods it.
FLOOD = 4.0
# Tokens served before the last so many hardly count any more.
RECENT_TOKENS = 65_536.0
# Tenants that are remembered; the one away longest is forgotten and begins level.
_MAX_TENANTS = 16_384


class FairShare(Policy):
    """weights: of tenants by name; 1 for all others."""

    has_priority_preemption = counts_running = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = {}
        self._last = 0.0  # the counter of the tenant that was served last
        # What each was served lately over its weight, as of when all together had been served that.
        self._recent: dict[str, tuple[float, float]] = {}
        self._total = 0.0
        self._running: Counter[str] = Counter()

    def begin(self, batch: RunningBatch, speed: SpeedEstimate, lengths: OutputLengths) -> None:
        """See Policy."""
        super().begin(batch, speed, lengths)
        # Known tokens of each slot that are charged.
        self._charged: NDArray[np.int32] = np.zeros(len(batch.sequences), np.int32)

    def flow(self, sequence: SequenceState) -> str:
        """Return the tenant; within a flow requests are served by arrival."""
        return sequence.request.tenant

    def flow_opens(self, flow: str, others: Collection[str]) -> None:
        """Lift the counter to the smallest one of the tenants that wait."""
        if others:
            level = min(self._settled(other) for other in others)
        else:
            level = self._last
        own = max(self._settled(flow), level)
        self._served.pop(flow, None)  # behind all others: it was here last
        self._served[flow] = own
        if len(self._served) > _MAX_TENANTS:
            self._forget_one(others)

    def flow_keys(self, flows: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """Return flooded tenants first, then by counters, with running requests settled."""
        self._settle()
        most = self._max_recent_tokens()
        return [(not self._is_flooded(flow, most), self._served[flow]) for flow in flows]

    def rank(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return whether its tenant is flooded, its counter, then its arrival."""
        tenant = sequence.request.tenant
        is_flooded = self._is_flooded(tenant, self._max_recent_tokens())
        return (not is_flooded, self._settled(tenant), *sequence.entry.key)

    def admitted(self, sequence: SequenceState, num_tokens: int) -> None:
        """Charge the prompt at once, so that no request is admitted on credit."""
        tenant = sequence.request.tenant
        if self._is_flooded(tenant, self._max_recent_tokens()):
            self.urgent.append(sequence)
        self._running[tenant] += 1
        self._charged[sequence.slot] = len(sequence.token_ids)
        if not sequence.preemption.count:
            self._charge(tenant, PROMPT_WEIGHT * num_tokens)
        self._last = self._settled(tenant)

    def released(self, sequence: SequenceState) -> None:
        """Charge the tokens generated since."""
        slot, tenant = sequence.slot, sequence.request.tenant
        tokens = int(self._batch.tokens.lengths[slot]) - int(self._charged[slot])
        self._charged[slot] += tokens
        self._charge(tenant, OUTPUT_WEIGHT * tokens)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if sequence in self.urgent:
            self.urgent.remove(sequence)

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return slots of the tenant that was served most first; of one tenant, the last served."""
        in_turn = super().victims(slots)
        served = [self._settled(self._batch.sequence(s).request.tenant) for s in in_turn.tolist()]
        return in_turn[np.argsort(-np.array(served), kind="stable")]

    def next_urgent(self, first_waiting: SequenceState | None) -> SequenceState | None:
        """Return the prompt of a flooded tenant, a running one before a waiting one."""
        self._settle()
        scheduled, most = self._batch.scheduled, self._max_recent_tokens()
        self.urgent = [
            sequence
            for sequence in self.urgent
            if scheduled[sequence.slot] < len(sequence.token_ids)
        ]
        waiting = [] if first_waiting is None else [first_waiting]
        for sequence in self.urgent + waiting:
            if self._is_flooded(sequence.request.tenant, most):
                return sequence
        return None

    def may_preempt(self, sequence: SequenceState) -> bool:
        """Return whether its tenant is flooded."""
        return self._is_flooded(sequence.request.tenant, self._max_recent_tokens())

    def yields_to(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether the one's tenant floods the other's."""
        most = self._recent_tokens(running.request.tenant)
        return self._is_flooded(sequence.request.tenant, most)

    def preempts(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return the same: a flooding tenant also loses slots."""
        return self.yields_to(running, sequence)

    def _is_flooded(self, tenant: str, most: float) -> bool:
        """Return whether a tenant with `most` recent tokens floods `tenant`."""
        return most > FLOOD * self._recent_tokens(tenant)

    def _max_recent_tokens(self) -> float:
        """Return the most recent tokens of a tenant with running requests."""
        return max(map(self._recent_tokens, self._running), default=0.0)

    def _recent_tokens(self, tenant: str) -> float:
        tokens, total = self._recent.get(tenant, (0.0, 0.0))
        return tokens * math.exp((total - self._total) / RECENT_TOKENS)

    def _settle(self) -> None:
        """Charge what running requests have generated."""
        batch, active = self._batch, self._batch.active
        lengths = batch.tokens.lengths[active]
        tokens = lengths - self._charged[active]
        rows = tokens.nonzero()[0]
        made: Counter[str] = Counter()
        for slot, count in zip(active[rows].tolist(), tokens[rows].tolist(), strict=True):
            made[batch.sequence(slot).request.tenant] += count
        for tenant, count in made.items():
            self._charge(tenant, OUTPUT_WEIGHT * count)
        self._charged[active] = lengths

    def _settled(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _charge(self, tenant: str, tokens: float) -> None:
        tokens_of_weight = tokens / self._weights.get(tenant, 1.0)
        self._served[tenant] = self._settled(tenant) + tokens_of_weight
        self._total += tokens
        self._recent[tenant] = (self._recent_tokens(tenant) + tokens_of_weight, self._total)

    def _forget_one(self, waiting: Collection[str]) -> None:
        """Forget the tenant that came back longest ago, of those without requests."""
        for tenant in self._served:
            if tenant not in waiting and tenant not in self._running:
                del self._served[tenant]
                self._recent.pop(tenant, None)
                return
