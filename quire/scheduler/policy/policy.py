"""Policy: in which order requests are served, and which lose their slot when blocks run out.

A policy is the four classes below; each method has a default, so that a policy states only what it
changes. An attribute in parentheses must be set for the method to be called, and
`has_priority_preemption` for those of PreemptionRule; by default nothing is preempted so.

| Class | Method | Called by | Default |
|---|---|---|---|
| `Order` (waiting_queue.py) | `queue_key` | WaitingQueue.add | the ordinal of arrival |
| | `delay_ms` (`has_delays`) | TTFTPredictor | 0 |
| | `rank` | PromptShares, Scheduler, Admitter | the key |
| `Flows` (waiting_queue.py) | `flow`, `flow_opens`, `flow_keys` | WaitingQueue | one flow |
| | `admitted` (`counts_running`) | SlotAllocator, BeamGroups | nothing |
| | `released` (`counts_running`) | RequestTable.release | nothing |
| `VictimOrder` | `victims` | Victims | those served last |
| `PreemptionRule` | `next_urgent`, `may_preempt`, `yields_to`, `preempts` | PriorityPreemption | |

`uses_lengths` (of `Order`): whether requests get `entry.likely_tokens`. A policy sees sequences,
slots and what steps cost; no blocks, no budgets, no clock. It need not ensure progress: running
requests get blocks in the order of their keys (not of their ranks), and victims are only asked for
among those behind the one that lacks blocks, so the first always advances.
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
    """Which running requests are preempted first. Default: those served last.

    Victims (preemption/victims.py) sorts what it gets by other rules first: nearly finished,
    `priority`, preempted before, and the cost of coming back. This order decides among equals, and
    for tenants above their ceiling.
    """

    _batch: RunningBatch

    def victims(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return `slots`, which come in the order of service, with the first victim first.

        Requests that are nearly finished come after all others.
        """
        batch, backwards = self._batch, slots[::-1]
        tokens_left = batch.longest[backwards] - batch.goal[backwards]
        nearly_finished = tokens_left <= NEARLY_FINISHED_TOKENS
        return backwards[np.argsort(nearly_finished, kind="stable")]


class PreemptionRule:
    """Whether running requests pause or are preempted for one that ranks before them.

    Default: never. has_priority_preemption: False if the methods need not be asked. urgent: running
    requests with prompts that others may pause for; next_urgent is asked in each step while there
    are some, else only in steps that may admit.
    """

    has_priority_preemption = False
    urgent: list[SequenceState]

    def next_urgent(self, first_waiting: SequenceState | None) -> SequenceState | None:
        """Return the request, running or next in the queue, that others pause for now."""
        return None

    def may_preempt(self, sequence: SequenceState) -> bool:
        """Return whether any running request may pause or be preempted for `sequence` now."""
        return self.has_priority_preemption

    def yields_to(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether `running` pauses so that the prompt of `sequence` is computed sooner."""
        return False

    def preempts(self, running: SequenceState, sequence: SequenceState) -> bool:
        """Return whether `running` may be preempted so that the waiting `sequence` runs now."""
        return False


class Policy(QueuePolicy, VictimOrder, PreemptionRule):
    """Base of all policies."""

    def begin(self, batch: RunningBatch, speed: SpeedEstimate, lengths: OutputLengths) -> None:
        """Take what decisions may depend on: running requests, step costs, output lengths."""
        self._batch, self._speed, self._lengths = batch, speed, lengths
        self.urgent = []
