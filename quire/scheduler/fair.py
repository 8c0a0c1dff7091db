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

from quire.scheduler.lengths import LengthHistory
from quire.scheduler.policy import FirstCome
from quire.scheduler.speed import SpeedEstimate
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
# Who had so many times as many tokens lately as another floods it.
FLOOD = 4.0
# What was served before so many tokens hardly counts any more.
LATELY_TOKENS = 65_536.0
# Tenants that are remembered; who has been away longest is forgotten and begins level.
_MOST_TENANTS = 16_384


class FairShare(FirstCome):
    """weights: of tenants by name; 1 for all others."""

    makes_way = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = {}
        self._last = 0.0  # the counter of the tenant that was served last
        # What each was served lately over its weight, as of when all together had been served that.
        self._lately: dict[str, tuple[float, float]] = {}
        self._total = 0.0
        self._running: Counter[str] = Counter()

    def begin(self, state: RunningState, speed: SpeedEstimate, lengths: LengthHistory) -> None:
        """See Policy."""
        super().begin(state, speed, lengths)
        # Known tokens of each slot that are charged.
        self._charged: NDArray[np.int32] = np.zeros(len(state.tickets), np.int32)

    def lane(self, ticket: Ticket) -> str:
        """One a tenant; by arrival within it."""
        return ticket.request.tenant

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
        most = self._most_lately()
        return [(not self._is_flooded(lane, most), self._served[lane]) for lane in lanes]

    def rank(self, ticket: Ticket) -> tuple[float, ...]:
        """Whether its tenant is flooded, its counter, then its arrival."""
        tenant = ticket.request.tenant
        is_flooded = self._is_flooded(tenant, self._most_lately())
        return (not is_flooded, self._settled(tenant), *ticket.key)

    def admitted(self, ticket: Ticket, num_tokens: int) -> None:
        """The prompt is charged at once, so that nobody is admitted on credit."""
        tenant = ticket.request.tenant
        if self._is_flooded(tenant, self._most_lately()):
            self.hurried.append(ticket)
        self._running[tenant] += 1
        self._charged[ticket.slot] = len(ticket.token_ids)
        if not ticket.num_preemptions:
            self._charge(tenant, PROMPT_WEIGHT * num_tokens)
        self._last = self._settled(tenant)

    def left(self, ticket: Ticket) -> None:
        """What it was served since is charged."""
        slot, tenant = ticket.slot, ticket.request.tenant
        tokens = int(self._state.tokens.lengths[slot]) - int(self._charged[slot])
        self._charged[slot] += tokens
        self._charge(tenant, OUTPUT_WEIGHT * tokens)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if ticket in self.hurried:
            self.hurried.remove(ticket)

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """First of the tenant that was served most; within it as FirstCome's."""
        in_turn = super().victims(slots)
        served = [self._settled(self._state.ticket(s).request.tenant) for s in in_turn.tolist()]
        return in_turn[np.argsort(-np.array(served), kind="stable")]

    def hurries(self, first_waiting: Ticket | None) -> Ticket | None:
        """A flooded tenant's prompt: who runs before who waits."""
        self._settle()
        scheduled, most = self._state.scheduled, self._most_lately()
        self.hurried = [
            ticket for ticket in self.hurried if scheduled[ticket.slot] < len(ticket.token_ids)
        ]
        waiting = [] if first_waiting is None else [first_waiting]
        for ticket in self.hurried + waiting:
            if self._is_flooded(ticket.request.tenant, most):
                return ticket
        return None

    def may_be_owed(self, ticket: Ticket) -> bool:
        """Whether its tenant is flooded."""
        return self._is_flooded(ticket.request.tenant, self._most_lately())

    def owes(self, running: Ticket, ticket: Ticket) -> bool:
        """Whether the one's tenant floods the other's."""
        most = self._had_lately(running.request.tenant)
        return self._is_flooded(ticket.request.tenant, most)

    def takes_place(self, running: Ticket, ticket: Ticket) -> bool:
        """As who owes."""
        return self.owes(running, ticket)

    def _is_flooded(self, tenant: str, most: float) -> bool:
        """Whether who had `most` lately floods `tenant`."""
        return most > FLOOD * self._had_lately(tenant)

    def _most_lately(self) -> float:
        """What the tenant had that had most lately, of those with running requests."""
        return max(map(self._had_lately, self._running), default=0.0)

    def _had_lately(self, tenant: str) -> float:
        tokens, total = self._lately.get(tenant, (0.0, 0.0))
        return tokens * math.exp((total - self._total) / LATELY_TOKENS)

    def _settle(self) -> None:
        """Charge what running requests have generated."""
        state, active = self._state, self._state.active
        lengths = state.tokens.lengths[active]
        tokens = lengths - self._charged[active]
        rows = tokens.nonzero()[0]
        made: Counter[str] = Counter()
        for slot, count in zip(active[rows].tolist(), tokens[rows].tolist(), strict=True):
            made[state.ticket(slot).request.tenant] += count
        for tenant, count in made.items():
            self._charge(tenant, OUTPUT_WEIGHT * count)
        self._charged[active] = lengths

    def _settled(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _charge(self, tenant: str, tokens: float) -> None:
        tokens_of_weight = tokens / self._weights.get(tenant, 1.0)
        self._served[tenant] = self._settled(tenant) + tokens_of_weight
        self._total += tokens
        self._lately[tenant] = (self._had_lately(tenant) + tokens_of_weight, self._total)

    def _forget_one(self, waiting: Collection[str]) -> None:
        """The tenant that came back longest ago, of those with nothing here."""
        for tenant in self._served:
            if tenant not in waiting and tenant not in self._running:
                del self._served[tenant]
                self._lately.pop(tenant, None)
                return
