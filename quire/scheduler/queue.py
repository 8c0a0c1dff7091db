"""WaitingQueue: the requests not running, in the order of the policy's keys.

Knows keys, lanes and tickets only. Each lane is kept sorted: entering costs a binary search,
leaving too; walking in order touches only what is looked at. Where there are several lanes, the
policy says before each step of a walk which one is next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

from quire.scheduler.policy import Policy
from quire.scheduler.ticket import Ticket

_Key = tuple[tuple[float, ...], int]


class _Lane:
    """Tickets by (key, arrival); two never compare equal because arrivals differ."""

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.tickets: dict[_Key, Ticket] = {}

    def add(self, ticket: Ticket) -> None:
        key = (ticket.key, ticket.arrival)
        insort(self.keys, key)
        self.tickets[key] = ticket

    def remove(self, ticket: Ticket) -> None:
        key = (ticket.key, ticket.arrival)
        del self.tickets[key]
        del self.keys[bisect_left(self.keys, key)]


class WaitingQueue:
    """Tickets in the order of `policy`, which is told of lanes that open.

    num_tokens: that those waiting know, all together.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._num_tickets = 0
        self.num_tokens = 0  # of all tickets together
        self.likely_tokens = 0.0  # that they will still make

    def __len__(self) -> int:
        return self._num_tickets

    def __iter__(self) -> Iterator[Ticket]:
        """Tickets in order. The one just yielded may be removed while iterating."""
        places = dict.fromkeys(self._lanes, 0)
        while places:
            name = next(iter(places)) if len(places) == 1 else self._next_lane(list(places))
            lane, place = self._lanes[name], places[name]
            key = lane.keys[place]
            yield lane.tickets[key]
            if place < len(lane.keys) and lane.keys[place] is key:
                places[name] = place = place + 1
            if place == len(lane.keys):
                del places[name]

    def batches(self, size: int) -> Iterator[list[Ticket]]:
        """Yield the tickets in order, some together where the order among them is settled.

        Those of the batch just yielded may be removed while iterating.
        """
        if len(self._lanes) != 1:
            yield from ([ticket] for ticket in self)
            return
        (lane,) = self._lanes.values()
        place = 0
        while keys := lane.keys[place : place + size]:
            yield [lane.tickets[key] for key in keys]
            place = bisect_right(lane.keys, keys[-1])

    @property
    def first(self) -> Ticket:
        """Who is next; there must be one."""
        return next(iter(self))

    def add(self, ticket: Ticket) -> None:
        """Put a ticket in its place; the policy gives it its key."""
        name = self._policy.lane(ticket)
        lane = self._lanes.get(name)
        if lane is None:
            self._policy.lane_opens(name, self._lanes.keys())
            lane = self._lanes[name] = _Lane()
        ticket.key = self._policy.queue_key(ticket)
        lane.add(ticket)
        self._count(ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands."""
        name = self._policy.lane(ticket)
        lane = self._lanes[name]
        lane.remove(ticket)
        if not lane.keys:
            del self._lanes[name]
        self._count(ticket, -1)

    def remove_all(self, tickets: Sequence[Ticket]) -> None:
        """Take tickets out; those at the head of a lane together."""
        (lane,) = self._lanes.values() if len(self._lanes) == 1 else (None,)
        keys = [(ticket.key, ticket.arrival) for ticket in tickets]
        if lane is None or lane.keys[: len(keys)] != keys:
            for ticket in tickets:
                self.remove(ticket)
            return
        del lane.keys[: len(keys)]
        for key in keys:
            del lane.tickets[key]
        if not lane.keys:
            self._lanes.clear()
        for ticket in tickets:
            self._count(ticket, -1)

    def num_before(self, ticket: Ticket) -> int:
        """About how many are served before `ticket`, which waits: with several lanes, as if
        those of one kind (see Policy.lane_keys) took turns, and the kinds came one by one."""
        own = self._policy.lane(ticket)
        place = bisect_left(self._lanes[own].keys, (ticket.key, ticket.arrival))
        if len(self._lanes) == 1:
            return place
        names = list(self._lanes)
        kinds = {n: key[0] for n, key in zip(names, self._policy.lane_keys(names), strict=True)}
        lengths = {name: len(self._lanes[name].keys) for name in names if name != own}
        first = sum(length for name, length in lengths.items() if kinds[name] < kinds[own])
        alike = (length for name, length in lengths.items() if kinds[name] == kinds[own])
        return place + first + sum(min(length, place) for length in alike)

    def _count(self, ticket: Ticket, number: int) -> None:
        self._num_tickets += number
        self.num_tokens += number * len(ticket.token_ids)
        self.likely_tokens += number * ticket.likely_tokens
        if not self._num_tickets:
            self.likely_tokens = 0.0  # rounding does not add up

    def _next_lane(self, names: list[str]) -> str:
        keys = self._policy.lane_keys(names)
        return names[min(range(len(names)), key=keys.__getitem__)]
