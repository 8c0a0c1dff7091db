"""FairShare: each tenant gets its weight's share of the tokens, as in "Fairness in Serving Large
Language Models" (the virtual token counter).

A tenant's counter is what it was served, in tokens over its weight; generated ones count twice.
The waiting request of the tenant with the smallest counter is next. Who comes back after a time
without anything waiting begins level with those that wait, so that nobody saves up. Counters move
on events only: running requests are settled when somebody asks. What is computed again
after a preemption is not charged again.
"""

from __future__ import annotations

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
# Tenants that are remembered; who has been away longest is forgotten and begins level.
_MOST_TENANTS = 16_384


class FairShare(FirstCome):
    """weights: of tenants by name; 1 for all others."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = {}
        self._last = 0.0  # the counter of the tenant that was served last

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

    def lane_keys(self, lanes: Sequence[str]) -> Sequence[float]:
        """The counters, with what running requests have been served since."""
        self._settle()
        return [self._served[lane] for lane in lanes]

    def rank(self, ticket: Ticket) -> tuple[float, ...]:
        """Its tenant's counter, then its arrival."""
        return (self._settled(ticket.request.tenant), *ticket.key)

    def admitted(self, ticket: Ticket, num_tokens: int) -> None:
        """The prompt is charged at once, so that nobody is admitted on credit."""
        self._charged[ticket.slot] = len(ticket.token_ids)
        if not ticket.num_preemptions:
            self._charge(ticket.request.tenant, PROMPT_WEIGHT * num_tokens)
        self._last = self._settled(ticket.request.tenant)

    def left(self, ticket: Ticket) -> None:
        """What it was served since is charged."""
        slot = ticket.slot
        tokens = int(self._state.tokens.lengths[slot]) - int(self._charged[slot])
        self._charged[slot] += tokens
        self._charge(ticket.request.tenant, OUTPUT_WEIGHT * tokens)

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """First of the tenant that was served most; within it as FirstCome's."""
        in_turn = super().victims(slots)
        served = [self._settled(self._state.ticket(s).request.tenant) for s in in_turn.tolist()]
        return in_turn[np.argsort(-np.array(served), kind="stable")]

    def _settle(self) -> None:
        """Charge what running requests have generated."""
        state, active = self._state, self._state.active
        lengths = state.tokens.lengths[active]
        tokens = lengths - self._charged[active]
        for row in tokens.nonzero()[0].tolist():
            tenant = state.ticket(int(active[row])).request.tenant
            self._charge(tenant, OUTPUT_WEIGHT * int(tokens[row]))
        self._charged[active] = lengths

    def _settled(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _charge(self, tenant: str, tokens: float) -> None:
        self._served[tenant] = self._settled(tenant) + tokens / self._weights.get(tenant, 1.0)

    def _forget_one(self, waiting: Collection[str]) -> None:
        """The tenant that came back longest ago, of those with nothing here."""
        running = {self._state.ticket(slot).request.tenant for slot in self._state.active.tolist()}
        for tenant in self._served:
            if tenant not in waiting and tenant not in running:
                del self._served[tenant]
                return
