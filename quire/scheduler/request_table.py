"""RequestTable: the live requests, and how each enters the queue, leaves its slot, and ends.

Knows sequences, their groups and where they are: in the queue or in a slot. Knows no budget and no
results, and decides nothing: which requests leave is an argument. Always holds: a live request is
in the queue, in a slot, a stream of a group that is in either, or paused; a request that leaves its
slot gives its blocks back, findable as far as they were computed; every such event allows
admissions to be tried again (`admission_is_due`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.cache.manager import CacheManager
from quire.scheduler.in_flight import InFlightPlans
from quire.scheduler.interfaces import BlockLoads, OutputLengths, SlotGroups
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.running_batch import Index, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceGroup, SequenceState
from quire.scheduler.step_budget import BlockShares
from quire.scheduler.step_history import StepHistory
from quire.scheduler.waiting_queue import QueuePolicy, WaitingQueue


class RequestTable:
    """sequences: by request id. retired: slots given back since the last plan was sent.

    admission_is_due: whether an admission may succeed. Events set it, so that a blocked queue costs
    nothing. predicts_lengths: whether waiting requests need a predicted output length. history: of
    steps and ended requests. now_ms: when the last schedule or update began.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        batch: RunningBatch,
        cache: CacheManager,
        policy: QueuePolicy,
        shares: BlockShares,
        *,
        groups: SlotGroups,
        loads: BlockLoads,
        lengths: OutputLengths,
    ) -> None:
        self.history = StepHistory(limits.timeline_steps)
        self.now_ms = 0.0
        self._limits = limits
        self._batch = batch
        self._cache = cache
        self._policy = policy
        self._shares = shares
        self._groups = groups
        self._loads = loads
        self._lengths = lengths
        self.queue = WaitingQueue(policy)
        self.in_flight = InFlightPlans()
        self.sequences: dict[str, SequenceState] = {}
        self._leaders: dict[str, SequenceState] = {}  # by group
        self.retired: list[int] = []
        self.admission_is_due = False
        self.predicts_lengths = policy.uses_lengths

    def token_limit(self, request: Request) -> int | None:
        """Return the most tokens `request` may have; None where it may not fit (see checks)."""
        prompt, sampling, limits = len(request.prompt_ids), request.sampling, self._limits
        least = prompt + len(request.output_ids) + (sampling.max_tokens != 0)
        limit = min(
            request.max_total_tokens, limits.max_model_len, self._shares.max_tokens(request)
        )
        is_simple = prompt > 0 and sampling.num_sequences <= limits.max_num_seqs
        if not is_simple or least > limit or sampling.use_beam_search:
            return None
        return limit

    def add(self, sequence: SequenceState) -> SequenceState | None:
        """Add a new request; return the sequence that entered the queue for it.

        That is itself, or the first beam of its group; None where that waits already.
        """
        request = sequence.request
        self.sequences[request.request_id] = sequence
        if request.sampling.use_beam_search:
            first = self._groups.add(sequence)
            if first is not None:
                self.enqueue(first)
            return first
        leader = self._leaders.get(request.group_id)
        if leader is None:  # the first of its group
            self._leaders[request.group_id] = sequence
        else:
            sequence.leader = leader
            leader.forks.append(sequence)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: SequenceState) -> None:
        """Put `sequence` into the queue, unless it is paused."""
        if sequence.is_held:
            return
        long_tokens = self._limits.long_prompt_tokens
        sequence.entry.is_long = 0 < long_tokens <= len(sequence.token_ids)
        if self.predicts_lengths:
            sequence.entry.likely_tokens = self._likely_tokens(sequence)
        self.queue.add(sequence)
        self._shares.enqueued(sequence)
        self.admission_is_due = True

    def requeue(self, sequence: SequenceState) -> None:
        """Give the waiting `sequence` a new place."""
        if not sequence.is_held:
            self._dequeue(sequence)
            self.enqueue(sequence)

    def predict_lengths(self) -> None:
        """Predict output lengths from now on, those of waiting requests included."""
        if self.predicts_lengths:
            return
        self.predicts_lengths = True
        for sequence in list(self.queue):
            self.queue.set_likely_tokens(sequence, self._likely_tokens(sequence))

    def set_aside(self, sequence: SequenceState) -> None:
        """Take the waiting `sequence`, which is paused now, out of the queue."""
        self._dequeue(sequence)
        self._loads.drop(sequence)

    def withdraw(self, sequence: SequenceState) -> None:
        """End a waiting request."""
        if not sequence.is_held:
            self._dequeue(sequence)
        history, num_known = sequence.history, len(sequence.token_ids)
        history.num_output_tokens = num_known - sequence.num_prompt_tokens
        self._forget(sequence)

    def abort(self, sequence: SequenceState) -> None:
        """End a request, wherever it is."""
        if sequence.group is not None:
            self._leave_group(sequence, sequence.group)
        elif sequence.slot == NO_SLOT:
            self.withdraw(sequence)
        else:
            self.finish([sequence])

    def finish(self, sequences: list[SequenceState]) -> None:
        """End running requests."""
        known = self._batch.tokens.lengths.item
        for sequence in sequences:
            num_output_tokens = known(sequence.slot) - sequence.num_prompt_tokens
            sequence.history.num_output_tokens = num_output_tokens
        if sequences:
            self.release([sequence.slot for sequence in sequences])
        for sequence in sequences:
            self._forget(sequence)

    def release(self, slots: list[int]) -> None:
        """Empty `slots`: their requests end or are preempted."""
        batch, index = self._batch, np.array(slots, np.intp)
        if self._policy.counts_running:
            for slot in slots:
                self._policy.released(batch.sequence(slot))
        self._cache.register(index, batch.computed[index], batch.tokens.tokens)
        self._cache.free(index, self.last_steps(index))
        self._shares.stopped(slots)
        batch.release(slots)
        self.retired.extend(slots)
        self.in_flight.left(slots)
        self.admission_is_due = True

    def take_retired(self) -> list[int]:
        """Return the slots given back since the last call."""
        retired, self.retired = self.retired, []
        return retired

    def last_steps(self, index: Index) -> NDArray[np.int64]:
        """Return the last plan in flight that names slot index[i], or its group; 0 for none."""
        steps = self.in_flight.last_steps(index)
        if self._groups.is_active:
            self._groups.keep_together(index, steps, self.in_flight)
        return steps

    def is_in_flight(self, slot: int) -> bool:
        """Return whether a plan in flight names `slot`."""
        return bool(self.last_steps(np.array([slot]))[0])

    def end_group(self, group: SequenceGroup) -> list[SequenceState]:
        """End a group, running or waiting; return its streams."""
        if group.slots:
            self.release(group.slots)
        else:
            self._dequeue(group.members[0])
            if self._loads.any_used:
                self._loads.forget(group.members[0])
        for stream in group.streams:
            stream.history.events = group.members[0].history.events
            self._end_history(stream)
            stream.alive = False
            del self.sequences[stream.request.request_id]
        self.admission_is_due = True
        self._groups.forget(group)
        return group.streams

    def _leave_group(self, stream: SequenceState, group: SequenceGroup) -> None:
        """End one stream of a group; the last one ends the group."""
        group.streams.remove(stream)
        if not group.streams:
            self.end_group(group)
        self._end_history(stream)
        stream.alive = False
        del self.sequences[stream.request.request_id]

    def _likely_tokens(self, sequence: SequenceState) -> float:
        num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        likely = self._lengths.predict(sequence.request, sequence.limit)
        return max(likely - num_generated, 1.0)

    def _dequeue(self, sequence: SequenceState) -> None:
        self.queue.remove(sequence)
        self._shares.dequeued(sequence)
        self.admission_is_due = True

    def _end_history(self, sequence: SequenceState) -> None:
        history = sequence.history
        history.ended_ms = self.now_ms
        self.history.ended.append(history)

    def _forget(self, sequence: SequenceState) -> None:
        """End a request that is in no slot and not in the queue."""
        sequence.alive = False
        if self._loads.any_used:
            self._loads.forget(sequence)
        self._end_history(sequence)
        request = sequence.request
        del self.sequences[request.request_id]
        if self._leaders.get(request.group_id) is sequence:
            del self._leaders[request.group_id]
            if sequence.forks:
                self._replace_leader(sequence)

    def _replace_leader(self, leader: SequenceState) -> None:
        """Let a fork take the place of a leader that ended before its prompt was computed."""
        waiting = [fork for fork in leader.forks if fork.alive and not fork.was_admitted]
        if not waiting or not math.isnan(leader.times.first_token_ms):
            return  # the forks find the prompt's blocks, or compute it side by side
        successor = waiting.pop(0)
        successor.leader, successor.forks = None, waiting
        for fork in waiting:
            fork.leader = successor
        self._leaders[successor.request.group_id] = successor
