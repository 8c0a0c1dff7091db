"""The policies to choose from, by name: fcfs, priority, sjf, fair, edf.

Each is an order (see policy.py) and nothing else. Those that favour some requests age all of
them: waiting makes up for what the others are favoured by, so that everybody is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quire.base.errors import SettingError
from quire.scheduler.fair import FairShare
from quire.scheduler.policy import FirstCome, Policy
from quire.scheduler.ticket import Ticket

# Waiting that makes up for one level of priority.
LEVEL_MS = 10_000.0
# Waiting that makes up for a job longer by one millisecond.
STRETCH = 1000.0
# When who names no deadline wants to be served, and who missed his first token's is again.
PATIENCE_MS = 30_000.0
# A level, or a millisecond of work, where waiting counts for nothing: more than anybody waits.
_FOR_EVER_MS = 1e12
# Rows that a step's fixed part is thought to be shared by.
_SHARED_BY = 8


class PriorityFirst(FirstCome):
    """The smallest `priority` first, as vLLM's; 10 s of waiting make up for one level.

    Who runs is served, and spared from preemption, in the same order. Who waits takes the place of
    one that runs where it is ahead of it by a whole level, waiting counted.
    """

    makes_way = True

    def __init__(self, aging: float = 1.0) -> None:
        self._level_ms = LEVEL_MS / aging if aging else math.inf

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """When it came, shifted by its level."""
        if math.isinf(self._level_ms):
            return (ticket.request.priority, ticket.arrival)
        return (ticket.request.arrival_ms + self.handicap_ms(ticket), ticket.arrival)

    def handicap_ms(self, ticket: Ticket) -> float:
        """By its level."""
        return ticket.request.priority * min(self._level_ms, _FOR_EVER_MS)

    def takes_place(self, running: Ticket, ticket: Ticket) -> bool:
        """By a whole level."""
        level = 1.0 if math.isinf(self._level_ms) else self._level_ms
        return running.key[0] - ticket.key[0] >= level


class ShortestFirst(FirstCome):
    """The least predicted work first: the prompt's, and that of as many tokens as are likely.

    How many is learned from answers to the same tenant's prompts of such a length. A job is
    passed only by those that come within 1,000 times the work they save.
    """

    def __init__(self, aging: float = 1.0) -> None:
        self._stretch = STRETCH / aging if aging else math.inf

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """When it came, shifted by its work."""
        if math.isinf(self._stretch):
            return (self.work_ms(ticket), ticket.arrival)
        return (ticket.request.arrival_ms + self.handicap_ms(ticket), ticket.arrival)

    def handicap_ms(self, ticket: Ticket) -> float:
        """By its work."""
        return self.work_ms(ticket) * min(self._stretch, _FOR_EVER_MS)

    def work_ms(self, ticket: Ticket) -> float:
        """Predicted milliseconds of the machine; less what is generated already."""
        prompt, known = ticket.num_prompt_tokens, len(ticket.token_ids)
        left = ticket.likely_tokens
        speed = self._speed
        each_ms = speed.step_ms(_SHARED_BY, _SHARED_BY * (known + left / 2)) / _SHARED_BY
        return speed.span_ms(0, prompt) + left * each_ms


class EarliestDeadline(FirstCome):
    """Whoever must be served soonest to keep its promise: `ttft_slo_ms`, or `deadline_ms` less
    the time its answer is likely to take. No promise: as if it wanted its first token in 30 s.

    Who has missed its first token's time cannot be helped any more, and stands back for others.
    """

    def __init__(self, aging: float = 1.0) -> None:
        self._patience_ms = PATIENCE_MS / aging if aging else math.inf

    def queue_key(self, ticket: Ticket) -> tuple[float, ...]:
        """When it must be served."""
        return (ticket.request.arrival_ms + self.handicap_ms(ticket), ticket.arrival)

    def handicap_ms(self, ticket: Ticket) -> float:
        """By the time that it has."""
        request, within_ms = ticket.request, math.inf
        if request.ttft_slo_ms is not None:
            missed_ms = self._patience_ms if ticket.missed_first_token else 0.0
            within_ms = request.ttft_slo_ms + missed_ms
        if request.deadline_ms is not None:
            tokens = ticket.likely_tokens
            depth = ticket.num_prompt_tokens + tokens / 2
            step_ms = self._speed.step_ms(_SHARED_BY, _SHARED_BY * depth)
            within_ms = min(within_ms, request.deadline_ms - tokens * step_ms)
        return self._patience_ms if math.isinf(within_ms) else within_ms


_BY_NAME: Mapping[str, Callable[[float], Policy]] = {
    "priority": PriorityFirst,
    "sjf": ShortestFirst,
    "edf": EarliestDeadline,
}
POLICY_NAMES = ("fcfs", "priority", "sjf", "fair", "edf")


def make_policy(
    name: str, *, aging: float = 1.0, weights: Mapping[str, float] | None = None
) -> Policy:
    """The policy of that name.

    aging: how much waiting counts, 1 as each policy has it, 0 not at all. weights: of tenants,
    for fair; 1 for who is not named. Raises SettingError for another name.
    """
    if name == "fcfs":
        return FirstCome()
    if name == "fair":
        return FairShare(weights or {})
    if name not in _BY_NAME:
        raise SettingError(f"scheduling_policy is {name!r}; allowed: {', '.join(POLICY_NAMES)}")
    return _BY_NAME[name](aging)
