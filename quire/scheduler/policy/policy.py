"""Policy: in which order requests are served, and which lose their slot when blocks run out.

A policy is an `Order` and `Lanes` (waiting_queue.py), a `VictimOrder` and an `Urgency`, each with
defaults, so that a policy states only what it changes. It sees sequences, slots and what steps
cost; no blocks, no budgets, no clock. It need not ensure progress: running requests get blocks in
the order of their keys, and victims are only asked for among those behind the one that lacks
blocks, so the first always advances.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.cost.speed import SpeedEstimate
from quire.scheduler.interfaces import OutputLengths
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.scheduler.waiting_queue import QueuePolicy

# A request with at most this many tokens left is preempted last: its blocks are free soon anyway.
NEARLY_FINISHED_TOKENS = 16


class VictimOrder:
    """Which running requests are preempted first. Default: those served last."""

    _batch: RunningBatch

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return `slots`, which come in the order of service, with the first victim first.

        Requests that are nearly finished come after all others.
        """
        batch, backwards = self._batch, slots[::-1]
        tokens_left = batch.longest[backwards] - batch.goal[backwards]
        nearly_finished = tokens_left <= NEARLY_FINISHED_TOKENS
        return backwards[np.argsort(nearly_finished, kind="stable")]


class Urgency:
    """Whether running requests pause or are preempted for one that ranks before them.

    Default: never. preempts_by_rank: False if the methods need not be asked. urgent: running
    requests with prompts that others may pause for.
    """

    preempts_by_rank = False
    urgent: list[SequenceState]

    def next_urgent(self, first_waiting: SequenceState | None) -> SequenceState | None:
        """Return the request, running or next in the queue, that others pause for now."""
        return None

    def may_preempt(self, sequence: SequenceState) -> bool:
        """Return whether any running request may pause or be preempted for `sequence` now."""
        return self.preempts_by_rank

    def yields_to(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether `running` pauses so that the prompt of `sequence` is computed sooner."""
        return False

    def preempts(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether `running` may be preempted so that the waiting `sequence` runs now."""
        return False


class Policy(QueuePolicy, VictimOrder, Urgency):
    """Base of all policies."""

    def begin(self, batch: RunningBatch, speed: SpeedEstimate, lengths: OutputLengths) -> None:
        """Take what decisions may depend on: running requests, step costs, output lengths."""
        self._batch, self._speed, self._lengths = batch, speed, lengths
        self.urgent = []
