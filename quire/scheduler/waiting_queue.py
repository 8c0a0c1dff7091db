"""WaitingQueue: the waiting requests, sorted by the policy's keys, in one or several lanes.

Knows keys, lanes and sequences only. Each lane is kept sorted: adding and removing cost a binary
search, and walking in order touches only what is looked at. Streams that continue come first. A
policy is an `Order` and `Lanes`; their defaults are first come, first served, in one lane.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence

from quire.scheduler.sequence import SequenceState

_Place = tuple[bool, tuple[float, ...], int]


class Order:
    """The order in which requests are admitted and prompts get tokens. Default: by arrival.

    uses_lengths: whether keys depend on predicted output lengths (`likely_tokens`). has_delays:
    False if delay_ms always returns 0.
    """

    uses_lengths = has_delays = False

    def queue_key(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return the key by which a lane is sorted, smallest first.

        Called when a request enters the queue: on arrival and after each preemption. The key must
        not fall while the request lives, except by its own progress: a preempted request that
        returned with a smaller key could overtake others again and again, and starve them. Keys
        that grow with the arrival time bound every wait.
        """
        return (sequence.arrival,)

    def delay_ms(self, sequence: SequenceState) -> float:
        """Return by how much later than its arrival a request is ranked within its lane."""
        return 0.0

    def rank(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return the current rank by which prompts, running or waiting, get tokens."""
        return sequence.entry.key


class Lanes:
    """Groups of the queue that take turns, such as tenants. Default: one lane.

    counts_running: whether `admitted` and `released` must be called.
    """

    counts_running = False

    def lane(self, sequence: SequenceState) -> str:
        """Return the lane in which a request waits."""
        return ""

    def lane_opens(self, lane: str, others: Collection[str]) -> None:
        """Note that a first request waits in `lane`, beside those in `others`."""

    def lane_keys(self, lanes: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """Return the current key of each lane; the smallest is next.

        A key begins with the kind of its lane. Only asked where there are several lanes.
        """
        return [()] * len(lanes)

    def admitted(self, sequence: SequenceState, num_tokens: int) -> None:
        """Note that a request got a slot, with num_tokens known tokens to compute."""

    def released(self, sequence: SequenceState) -> None:
        """Note that a request, still in its slot, is about to leave it."""


class QueuePolicy(Order, Lanes):
    """The part of a policy that the core uses."""


def _place(sequence: SequenceState) -> _Place:
    """Return where a sequence stands in its lane: a stream that continues was admitted before."""
    return (not len(sequence.request.output_ids), sequence.entry.key, sequence.arrival)


class _Lane:
    """Sequences by place; no two compare equal because arrivals differ."""

    def __init__(self) -> None:
        self.keys: list[_Place] = []
        self.sequences: dict[_Place, SequenceState] = {}

    def add(self, sequence: SequenceState) -> None:
        key = _place(sequence)
        insort(self.keys, key)
        self.sequences[key] = sequence

    def remove(self, sequence: SequenceState) -> None:
        key = _place(sequence)
        del self.sequences[key]
        del self.keys[bisect_left(self.keys, key)]


class WaitingQueue:
    """Waiting sequences in the order of `policy`.

    num_tokens: known tokens of all of them. likely_tokens: predicted output tokens still to come.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._num_sequences = 0
        self.num_tokens = 0
        self.likely_tokens = 0.0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[SequenceState]:
        """Yield the sequences in order. The one just yielded may be removed while iterating."""
        places = dict.fromkeys(self._lanes, 0)
        while places:
            name = next(iter(places)) if len(places) == 1 else self._next_lane(list(places))
            lane, place = self._lanes[name], places[name]
            key = lane.keys[place]
            yield lane.sequences[key]
            if place < len(lane.keys) and lane.keys[place] is key:
                places[name] = place = place + 1
            if place == len(lane.keys):
                del places[name]

    def batches(self, size: int) -> Iterator[list[SequenceState]]:
        """Yield the sequences in order, up to `size` at once where there is one lane.

        Those of the batch just yielded may be removed while iterating.
        """
        if len(self._lanes) != 1:
            yield from ([sequence] for sequence in self)
            return
        (lane,) = self._lanes.values()
        place = 0
        while keys := lane.keys[place : place + size]:
            yield [lane.sequences[key] for key in keys]
            place = bisect_right(lane.keys, keys[-1])

    @property
    def first(self) -> SequenceState:
        """The next sequence; the queue must not be empty."""
        return next(iter(self))

    def add(self, sequence: SequenceState) -> None:
        """Insert a sequence under the key that the policy gives it."""
        name = self._policy.lane(sequence)
        lane = self._lanes.get(name)
        if lane is None:
            self._policy.lane_opens(name, self._lanes.keys())
            lane = self._lanes[name] = _Lane()
        sequence.entry.key = self._policy.queue_key(sequence)
        lane.add(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence from wherever it stands."""
        name = self._policy.lane(sequence)
        lane = self._lanes[name]
        lane.remove(sequence)
        if not lane.keys:
            del self._lanes[name]
        self._count(sequence, -1)

    def remove_all(self, sequences: Sequence[SequenceState]) -> None:
        """Remove several sequences; those at the head of the only lane in one operation."""
        (lane,) = self._lanes.values() if len(self._lanes) == 1 else (None,)
        keys = [_place(sequence) for sequence in sequences]
        if lane is None or lane.keys[: len(keys)] != keys:
            for sequence in sequences:
                self.remove(sequence)
            return
        del lane.keys[: len(keys)]
        for key in keys:
            del lane.sequences[key]
        if not lane.keys:
            self._lanes.clear()
        for sequence in sequences:
            self._count(sequence, -1)

    def num_before(self, sequence: SequenceState) -> int:
        """Return about how many waiting requests are admitted before `sequence`.

        With several lanes, those of one kind (see Lanes.lane_keys) count as taking turns, and kinds
        as served one after the other.
        """
        own = self._policy.lane(sequence)
        place = bisect_left(self._lanes[own].keys, _place(sequence))
        if len(self._lanes) == 1:
            return place
        names = list(self._lanes)
        kinds = {n: key[0] for n, key in zip(names, self._policy.lane_keys(names), strict=True)}
        lengths = {name: len(self._lanes[name].keys) for name in names if name != own}
        first = sum(length for name, length in lengths.items() if kinds[name] < kinds[own])
        alike = (length for name, length in lengths.items() if kinds[name] == kinds[own])
        return place + first + sum(min(length, place) for length in alike)

    def set_likely_tokens(self, sequence: SequenceState, likely_tokens: float) -> None:
        """Note the predicted output length of a waiting request."""
        self.likely_tokens += likely_tokens - sequence.entry.likely_tokens
        sequence.entry.likely_tokens = likely_tokens

    def _count(self, sequence: SequenceState, number: int) -> None:
        self._num_sequences += number
        self.num_tokens += number * len(sequence.token_ids)
        self.likely_tokens += number * sequence.entry.likely_tokens
        if not self._num_sequences:
            self.likely_tokens = 0.0  # removes rounding errors

    def _next_lane(self, names: list[str]) -> str:
        keys = self._policy.lane_keys(names)
        return names[min(range(len(names)), key=keys.__getitem__)]
