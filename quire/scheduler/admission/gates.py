"""Gates: reasons for a waiting request to be passed over, though it is its turn.

Gates see sequences and the running batch (interfaces.py has the protocol); they change neither.
"""

from __future__ import annotations

from quire.base.timeline import WaitReason
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState


class ForkGate:
    """Forks wait until the leader of their group has computed the prompt they share.

    Only before their first admission, and only while the leader lives: a fork without a live
    leader, or one that was preempted, computes on its own.
    """

    until_event = False

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether the leader still has prompt to compute."""
        leader = sequence.leader
        if leader is None or sequence.was_admitted or not leader.alive:
            return False
        return leader.slot == NO_SLOT or not batch.has_prompt(leader)


class LengthGate:
    """Limits how many requests with long prompts, and how many others, run at once; 0: any number.

    Requests of one kind overtake waiting ones of the other, because they do not take their slots.
    """

    until_event = True
    reason = WaitReason.LENGTH

    def __init__(self, max_long: int, max_short: int) -> None:
        self._max_long = max_long
        self._max_short = max_short

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether as many of its kind run as may."""
        if sequence.entry.is_long:
            return 0 < self._max_long <= batch.num_long
        num_short = len(batch.sequences) - len(batch.free_slots) - batch.num_long
        return 0 < self._max_short <= num_short
