"""FairShare: each tenant gets its weight's share of the tokens, as in "Fairness in Serving Large
Language Models" (the virtual token counter).

A tenant's counter is what it was served, in tokens over its weight; generated ones count twice.
The waiting request of the tenant with the smallest counter is next. Who comes back after a time
without anything waiting begins level with those that wait, so that nobody saves up. Counters move
on events only: running requests are settled when somebody asks. What is computed again
after a preemption is not charged again.

Being next is not enough beside a flood, whose rows fill the steps, the slots and the blocks. So who
had less than a quarter of another's tokens lately is flooded by it: it goes first, the other's rows
stand back and none of its prompts begins while its own is computed, and it takes the place of one
of them if there is no other.
Lately is a number of tokens served, to anybody, not a time: nothing here depends on a machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.interfaces import OutputLengths
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# Who had so many times as many tokens lately as another floods it.
FLOOD = 4.0
# What was served before so many tokens hardly counts any more.
RECENT_TOKENS = 65_536.0
# Tenants that are remembered; who has been away longest is forgotten and begins level.
_MOST_TENANTS = 16_384


class FairShare(FirstCome):
    """weights: of tenants by name; 1 for all others."""

    preempts_by_rank = True

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

    def lane(self, sequence: SequenceState) -> str:
        """One a tenant; by arrival within it."""
        return sequence.request.tenant

    def lane_opens(self, lane: str, others: Collection[str]) -> None:
        """Lifted to the smallest counter of those that wait."""
        if others:
            level = min(self._settled(other) for other in others)
        else:
            level = self._last
        own = max(self._settled(lane), level)
        self._served.pop(lane, None)  # behind all others: it was here last
        self._served[lane] = own
        if len(self._served) > _MOST_TENANTS:
            self._forget_one(others)

    def lane_keys(self, lanes: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """Who is flooded first; then by the counters, with what running requests have been served
        since."""
        self._settle()
        most = self._max_recent_tokens()
        return [(not self._is_flooded(lane, most), self._served[lane]) for lane in lanes]

    def rank(self, sequence: SequenceState) -> tuple[float, ...]:
        """Whether its tenant is flooded, its counter, then its arrival."""
        tenant = sequence.request.tenant
        is_flooded = self._is_flooded(tenant, self._max_recent_tokens())
        return (not is_flooded, self._settled(tenant), *sequence.key)

    def admitted(self, sequence: SequenceState, num_tokens: int) -> None:
        """The prompt is charged at once, so that nobody is admitted on credit."""
        tenant = sequence.request.tenant
        if self._is_flooded(tenant, self._max_recent_tokens()):
            self.urgent.append(sequence)
        self._running[tenant] += 1
        self._charged[sequence.slot] = len(sequence.token_ids)
        if not sequence.num_preemptions:
            self._charge(tenant, PROMPT_WEIGHT * num_tokens)
        self._last = self._settled(tenant)

    def released(self, sequence: SequenceState) -> None:
        """What it was served since is charged."""
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
        """First of the tenant that was served most; within it as FirstCome's."""
        in_turn = super().victims(slots)
        served = [self._settled(self._batch.sequence(s).request.tenant) for s in in_turn.tolist()]
        return in_turn[np.argsort(-np.array(served), kind="stable")]

    def most_urgent(self, first_waiting: SequenceState | None) -> SequenceState | None:
        """A flooded tenant's prompt: who runs before who waits."""
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
        """Whether its tenant is flooded."""
        return self._is_flooded(sequence.request.tenant, self._max_recent_tokens())

    def yields_to(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Whether the one's tenant floods the other's."""
        most = self._recent_tokens(running.request.tenant)
        return self._is_flooded(sequence.request.tenant, most)

    def preempts(self, running: SequenceState, sequence: SequenceState) -> bool:
        """As who yields_to."""
        return self.yields_to(running, sequence)

    def _is_flooded(self, tenant: str, most: float) -> bool:
        """Whether who had `most` lately floods `tenant`."""
        return most > FLOOD * self._recent_tokens(tenant)

    def _max_recent_tokens(self) -> float:
        """What the tenant had that had most lately, of those with running requests."""
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
        """The tenant that came back longest ago, of those with nothing here."""
        for tenant in self._served:
            if tenant not in waiting and tenant not in self._running:
                del self._served[tenant]
                self._recent.pop(tenant, None)
                return
