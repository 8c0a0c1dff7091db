"""Gate: which waiting requests may not be admitted yet, though it is their turn.

A gated request is passed over and asked again in the next step, or after the next event where
nothing else can help; it loses no place. Gates see sequences and the running batch; they change
neither.
"""

from __future__ import annotations

from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState


class ForkGate:
    """Forks wait until the leader of their group has computed the prompt they share.

    Only before their first admission, and only while that leader lives: a fork whose leader has
    ended with nobody in its place, or that was preempted, computes on its own.
    """

    until_event = False

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Whether the leader still has prompt to compute."""
        leader = sequence.leader
        if leader is None or sequence.was_admitted or not leader.alive:
            return False
        return leader.slot == NO_SLOT or not batch.has_prompt(leader)


class LengthGate:
    """So many requests with long prompts may run at once, and so many others; 0: any number.

    Those of one kind pass waiting ones of the other, whose places they do not take.
    """

    until_event = True

    def __init__(self, max_long: int, max_short: int) -> None:
        self._max_long = max_long
        self._max_short = max_short

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Whether as many of its kind run as may."""
        if sequence.is_long:
            return 0 < self._max_long <= batch.num_long
        num_short = len(batch.sequences) - len(batch.free_slots) - batch.num_long
        return 0 < self._max_short <= num_short
