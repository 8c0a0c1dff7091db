"""WaitingQueue: the waiting requests, sorted by the policy's keys, in one or several flows.

Knows keys, flows and sequences only. Each flow is kept sorted: adding and removing cost a binary
search, and walking in order touches only what is looked at. Streams that continue come first. Of a
policy it asks an `Order` and `Flows`; policy/policy.py lists all methods and their callers.
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
        """Return the key by which a flow is sorted, smallest first.

        Called whenever a request enters the queue (RequestTable.enqueue). A key may differ from the
        last one by the request's progress and by what was learned meanwhile, within bounds: one
        that fell at each preemption would overtake others again and again, and starve them. Keys of
        the arrival time plus a bounded delay bound every wait.
        """
        return (sequence.arrival,)

    def delay_ms(self, sequence: SequenceState) -> float:
        """Return by how much later than its arrival a request is ranked within its flow."""
        return 0.0

    def rank(self, sequence: SequenceState) -> tuple[float, ...]:
        """Return the rank by which prompts get tokens; it orders waiting ones as the queue does."""
        return sequence.entry.key


class Flows:
    """Parts of the queue that take turns, as in fair queueing: tenants. Default: one flow.

    counts_running: whether `admitted` and `released` must be called.
    """

    counts_running = False

    def flow(self, sequence: SequenceState) -> str:
        """Return the flow in which a request waits."""
        return ""

    def flow_opens(self, flow: str, others: Collection[str]) -> None:
        """Note that a first request waits in `flow`, beside those in `others`."""

    def flow_keys(self, flows: Sequence[str]) -> Sequence[tuple[float, ...]]:
        """Return the current key of each flow; the smallest is next.

        A key begins with the kind of its flow. Only asked where there are several flows.
        """
        return [(0,)] * len(flows)

    def admitted(self, sequence: SequenceState, num_tokens: int) -> None:
        """Note that a request got a slot, with num_tokens known tokens to compute."""

    def released(self, sequence: SequenceState) -> None:
        """Note that a request, still in its slot, is about to leave it."""


class QueuePolicy(Order, Flows):
    """The part of a policy that the queue and admission use."""


def _place(sequence: SequenceState) -> _Place:
    """Return where a sequence stands in its flow: a stream that continues was admitted before."""
    return (not len(sequence.request.output_ids), sequence.entry.key, sequence.arrival)


class _Flow:
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
        self._flows: dict[str, _Flow] = {}
        self._num_sequences = 0
        self.num_tokens = 0
        self.likely_tokens = 0.0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[SequenceState]:
        """Yield the sequences in order. The one just yielded may be removed while iterating."""
        places = dict.fromkeys(self._flows, 0)
        while places:
            name = next(iter(places)) if len(places) == 1 else self._next_flow(list(places))
            flow, place = self._flows[name], places[name]
            key = flow.keys[place]
            yield flow.sequences[key]
            if place < len(flow.keys) and flow.keys[place] is key:
                places[name] = place = place + 1
            if place == len(flow.keys):
                del places[name]

    def batches(self, size: int) -> Iterator[list[SequenceState]]:
        """Yield the sequences in order, up to `size` at once where there is one flow.

        Those of the batch just yielded may be removed while iterating.
        """
        if len(self._flows) != 1:
            yield from ([sequence] for sequence in self)
            return
        (flow,) = self._flows.values()
        place = 0
        while keys := flow.keys[place : place + size]:
            yield [flow.sequences[key] for key in keys]
            place = bisect_right(flow.keys, keys[-1])

    @property
    def first(self) -> SequenceState:
        """The next sequence; the queue must not be empty."""
        return next(iter(self))

    def add(self, sequence: SequenceState) -> None:
        """Insert a sequence under the key that the policy gives it."""
        name = self._policy.flow(sequence)
        flow = self._flows.get(name)
        if flow is None:
            self._policy.flow_opens(name, self._flows.keys())
            flow = self._flows[name] = _Flow()
        sequence.entry.key = self._policy.queue_key(sequence)
        flow.add(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence from wherever it stands."""
        name = self._policy.flow(sequence)
        flow = self._flows[name]
        flow.remove(sequence)
        if not flow.keys:
            del self._flows[name]
        self._count(sequence, -1)

    def remove_all(self, sequences: Sequence[SequenceState]) -> None:
        """Remove several sequences; those at the head of the only flow in one operation."""
        (flow,) = self._flows.values() if len(self._flows) == 1 else (None,)
        keys = [_place(sequence) for sequence in sequences]
        if flow is None or flow.keys[: len(keys)] != keys:
            for sequence in sequences:
                self.remove(sequence)
            return
        del flow.keys[: len(keys)]
        for key in keys:
            del flow.sequences[key]
        if not flow.keys:
            self._flows.clear()
        for sequence in sequences:
            self._count(sequence, -1)

    def num_before(self, sequence: SequenceState) -> int:
        """Return about how many waiting requests are admitted before `sequence`.

        With several flows, those of one kind (see Flows.flow_keys) count as taking turns, and kinds
        as served one after the other.
        """
        own = self._policy.flow(sequence)
        place = bisect_left(self._flows[own].keys, _place(sequence))
        if len(self._flows) == 1:
            return place
        names = list(self._flows)
        kinds = {n: key[0] for n, key in zip(names, self._policy.flow_keys(names), strict=True)}
        lengths = {name: len(self._flows[name].keys) for name in names if name != own}
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

    def _next_flow(self, names: list[str]) -> str:
        keys = self._policy.flow_keys(names)
        return names[min(range(len(names)), key=keys.__getitem__)]
